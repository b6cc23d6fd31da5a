"""Lays out a training example as a reader would mark it: masked, replaced and kept pieces in colours of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from data_prep.inspection.lookup import Example
from data_prep.vocabulary.vocabulary import MASK, Vocabulary

STYLES = {"masked": "bold magenta", "replaced": "bold red", "kept": "bold green", "special": "dim"}


def describe_example(index: int, example: Example) -> str:
    """Describes an example: its size, its masks, its segment B and its document."""
    size = len(example.pieces)
    follows = "no B" if example.boundary == size else "B is random" if example.random_next else "B follows A"
    figures = f"example {index}: {size} pieces, {len(example.labels)} masked, {follows}"
    return f"{figures}; document {example.document} {example.source}".rstrip()


@dataclass(frozen=True)
class MarkedPiece:
    """A piece of an example, and whether it was masked, replaced or kept."""

    segment: Literal["A", "B"]
    style: str
    """A key of STYLES; "" for plain text."""
    now: str
    was: str
    """The original piece."""
    begins: bool
    """Whether it is the first of its segment."""

    @property
    def spelling(self) -> str:
        """Spells the piece; one that is to be predicted with what the model reads in its place."""
        signs = {"masked": f"{self.was}→{self.now}", "replaced": f"{self.was}→{self.now}", "kept": f"={self.was}="}
        return signs.get(self.style) or self.now.removeprefix("##")

    @property
    def is_glued(self) -> bool:
        """Whether the piece stands close to the one before it, whose word it continues."""
        spelled = self.now if self.style in ("", "special") else self.spelling
        return self.begins or spelled.startswith("##")


def mark_pieces(example: Example, vocabulary: Vocabulary) -> Iterator[MarkedPiece]:
    """Yields the pieces of an example with their styles."""
    for position, piece in enumerate(example.pieces):
        now, label = vocabulary.pieces[piece], example.labels.get(position)
        was = None if label is None else vocabulary.pieces[label]
        style = _style(position, now, was, example)
        segment: Literal["A", "B"] = "A" if position < example.boundary else "B"
        begins = position in (0, example.boundary)
        yield MarkedPiece(segment, style, now, now if was is None else was, begins)


def format_example(example: Example, vocabulary: Vocabulary) -> list[Text]:
    """Writes the segments on a line each, with what stood at masked positions, and a legend."""
    segments = {"A": Text("A  "), "B": Text("B  ")}
    for piece in mark_pieces(example, vocabulary):
        segments[piece.segment].append("" if piece.is_glued else " ").append(piece.spelling, STYLES.get(piece.style))
    legend = Text("")
    for style, sample in (("masked", "word→[MASK]"), ("replaced", "word→other"), ("kept", "=word=")):
        legend.append(f"{style} " if not legend else f"  {style} ").append(sample, STYLES[style])
    return [segments["A"], *([segments["B"]] if len(segments["B"]) > 3 else []), legend]


def _style(position: int, now: str, was: str | None, example: Example) -> str:
    """Returns the key of STYLES for a piece; "" for plain text."""
    if was is None:
        return "special" if position in (0, example.boundary - 1, len(example.pieces) - 1) else ""
    return "masked" if now == MASK else "kept" if now == was else "replaced"
