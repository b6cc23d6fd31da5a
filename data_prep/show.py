#!/usr/bin/env python3
"""Prints a training example as a reader would mark it.

    python data_prep/show.py data/wiki --length 128 --index 7

Also works on a folder that is not finished, from the moment that it has examples.
"""

import sys
from pathlib import Path
from typing import Any

from rich.text import Text

from data_prep.vocabulary.vocabulary import MASK, Vocabulary

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin(ends_with_reader=True)

import io
from dataclasses import dataclass
from typing import Annotated

import tyro

from data_prep.common.capacity import limit_memory
from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console
from data_prep.inspection.lookup import Place, find_example


@dataclass(frozen=True)
class Show:
    """Prints a training example: segments A and B, and what is masked, replaced or kept."""

    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote or is writing."""
    length: int | None = None
    """Length of the examples (default: the shortest there is)."""
    index: int = 0
    """Which example, from 0."""
    duplicate: int = 0
    """Which masking duplicate."""
    validation: bool = False
    """An example of the documents held out."""


def main(arguments: list[str]) -> int:
    """Prints the example that the arguments name; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    console, errors = open_console(soft_wrap=True), open_console(stderr=True, soft_wrap=True)
    wanted = tyro.cli(Show, args=arguments, prog="show.py", config=(tyro.conf.FlagCreatePairsOff,))
    place = Place(wanted.data, wanted.length, wanted.index, wanted.duplicate, wanted.validation)
    try:
        example, vocabulary = find_example(place)
    except (UserError, PermissionError) as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    console.print(heading(wanted.index, example), markup=False)
    for line in marked(example, vocabulary):
        console.print(line)
    return 0


STYLES = {"masked": "bold magenta", "replaced": "bold red", "kept": "bold green", "special": "dim"}


def heading(index: int, example: dict[str, Any]) -> str:
    """Says what the example is: its size, its masks, what segment B is, and which document it comes from."""
    size, masked = len(example["pieces"]), len(example["masked"])
    source = " ".join(str(example[key]) for key in ("source", "id", "title") if example.get(key))
    follows = "no B" if example["boundary"] == size else "B is random" if example["random_next"] else "B follows A"
    figures = f"example {index}: {size} pieces, {masked} masked, {follows}"
    return f"{figures}; document {example['document']} {source}".rstrip()


def marked(example: dict[str, Any], vocabulary: Vocabulary) -> list[Text]:
    """Writes the segments on a line each, with what stood at masked positions, and a legend."""
    labels = {mask["position"]: vocabulary.pieces[mask["piece"]] for mask in example["masked"]}
    segments = {"A": Text("A  "), "B": Text("B  ")}
    for position, piece in enumerate(example["pieces"]):
        text = segments["A" if position < example["boundary"] else "B"]
        now, was = vocabulary.pieces[piece], labels.get(position)
        style = _style(position, now, was, example)
        shown = now if was is None else f"{was}→{now}" if style != "kept" else f"={was}="
        glue = "" if shown.startswith("##") or len(text) == 3 else " "
        text.append(glue).append(shown.removeprefix("##") if was is None else shown, STYLES.get(style))
    legend = Text("")
    for style, sample in (("masked", "word→[MASK]"), ("replaced", "word→other"), ("kept", "=word=")):
        legend.append(f"{style} " if not legend else f"  {style} ").append(sample, STYLES[style])
    return [segments["A"], *([segments["B"]] if len(segments["B"]) > 3 else []), legend]


def _style(position: int, now: str, was: str | None, example: dict[str, Any]) -> str:
    """Names what became of a piece, by which its colour is chosen; nothing where it is plain text."""
    if was is None:
        return "special" if position in (0, example["boundary"] - 1, len(example["pieces"]) - 1) else ""
    return "masked" if now == MASK else "kept" if now == was else "replaced"


if __name__ == "__main__":
    limit_memory()
    sys.exit(main(sys.argv[1:]))
