"""Lays out a training example as a reader would mark it: masked, replaced and kept pieces in colours of their own."""

from __future__ import annotations

from rich.text import Text

from data_prep.inspection.lookup import Example
from data_prep.vocabulary.vocabulary import MASK, Vocabulary

STYLES = {"masked": "bold magenta", "replaced": "bold red", "kept": "bold green", "special": "dim"}


def heading(index: int, example: Example) -> str:
    """Says what the example is: its size, its masks, what segment B is, and which document it comes from."""
    size = len(example.pieces)
    follows = "no B" if example.boundary == size else "B is random" if example.random_next else "B follows A"
    figures = f"example {index}: {size} pieces, {len(example.labels)} masked, {follows}"
    return f"{figures}; document {example.document} {example.source}".rstrip()


def marked(example: Example, vocabulary: Vocabulary) -> list[Text]:
    """Writes the segments on a line each, with what stood at masked positions, and a legend."""
    labels = {position: vocabulary.pieces[piece] for position, piece in example.labels.items()}
    segments = {"A": Text("A  "), "B": Text("B  ")}
    for position, piece in enumerate(example.pieces):
        text = segments["A" if position < example.boundary else "B"]
        now, was = vocabulary.pieces[piece], labels.get(position)
        style = _style(position, now, was, example)
        shown = now if was is None else f"{was}→{now}" if style != "kept" else f"={was}="
        glue = "" if shown.startswith("##") or len(text) == 3 else " "
        text.append(glue).append(shown.removeprefix("##") if was is None else shown, STYLES.get(style))
    legend = Text("")
    for style, sample in (("masked", "word→[MASK]"), ("replaced", "word→other"), ("kept", "=word=")):
        legend.append(f"{style} " if not legend else f"  {style} ").append(sample, STYLES[style])
    return [segments["A"], *([segments["B"]] if len(segments["B"]) > 3 else []), legend]


def _style(position: int, now: str, was: str | None, example: Example) -> str:
    """Names what became of a piece, by which its colour is chosen; nothing where it is plain text."""
    if was is None:
        return "special" if position in (0, example.boundary - 1, len(example.pieces) - 1) else ""
    return "masked" if now == MASK else "kept" if now == was else "replaced"
