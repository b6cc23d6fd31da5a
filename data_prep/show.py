#!/usr/bin/env python3
"""Prints a training example as a reader would mark it.

    python data_prep/show.py data/wiki --length 128 --index 7

Also works on a folder that is not finished, from the moment that it has examples.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import tyro
from rich.console import Console
from rich.text import Text

from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.shards import DOCUMENTS, MANIFEST, WORK, Manifest, ShardSet, map_batches, read_shard
from data_prep.vocabulary.vocabulary import MASK, VOCABULARY, Vocabulary, load_vocabulary

STYLES = {"masked": "bold magenta", "replaced": "bold red", "kept": "bold green", "special": "dim"}


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
    """Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have all characters
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    wanted = tyro.cli(Show, args=arguments, prog="show.py", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        finished = (wanted.data / MANIFEST).exists() or not (wanted.data / WORK / "plan.json").exists()
        example, cased = _finished_example(wanted) if finished else _unfinished_example(wanted)
        vocabulary = load_vocabulary(wanted.data / VOCABULARY, cased)
        console.print(_heading(wanted, example), markup=False)
        for line in marked(example, vocabulary):
            console.print(line)
    except UserError as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    return 0


def _finished_example(wanted: Show) -> tuple[dict[str, Any], bool]:
    manifest = Manifest.read(wanted.data)
    sets = manifest.sets()
    length = min(shards.length for shards in sets) if wanted.length is None else wanted.length
    chosen = ShardSet(length, 0 if wanted.validation else wanted.duplicate, wanted.validation)
    if chosen not in sets:
        raise UserError(f"{wanted.data}: no {chosen.folder}; there is {', '.join(each.folder for each in sets)}")
    total = sum(record.rows for record in sets[chosen])
    if not 0 <= wanted.index < total:
        raise UserError(f"--index {wanted.index}: {chosen.folder} has {total:,} examples, 0 to {total - 1}")
    row = wanted.index
    for record in sets[chosen]:
        if row < record.rows:
            example = read_shard(wanted.data / record.path).slice(row, 1).to_pylist()[0]
            return {**example, **_document(wanted.data, example["document"])}, manifest.content["vocabulary"]["cased"]
        row -= record.rows
    raise AssertionError("the rows of the records add up to the total")


def _unfinished_example(wanted: Show) -> tuple[dict[str, Any], bool]:
    """From the examples before the global shuffle."""
    settings = read_json(wanted.data / WORK / "plan.json")["settings"]
    length = min(settings["lengths"]) if wanted.length is None else wanted.length
    number = settings["duplicates"] if wanted.validation else wanted.duplicate
    row = wanted.index
    files = sorted((wanted.data / WORK / "examples").glob(f"*-{length}.arrow"))
    for path in files:
        reader = map_batches(path)
        if not 0 <= number < reader.num_record_batches:
            break
        batch = reader.get_batch(number)
        if 0 <= row < batch.num_rows:
            return batch.slice(row, 1).to_pylist()[0], settings["cased"]
        row -= batch.num_rows
    raise UserError(
        f"{wanted.data}: not finished, and no such example yet; "
        f"files of examples of length {length} so far: {len(files)}. Run shard.py again to continue"
    )


def _document(folder: Path, number: int) -> dict[str, Any]:
    """The id, title and source of a document."""
    reader = map_batches(folder / DOCUMENTS)
    for index in range(reader.num_record_batches):
        batch: pa.RecordBatch = reader.get_batch(index)
        if number < batch.num_rows:
            return dict(batch.slice(number, 1).to_pylist()[0])
        number -= batch.num_rows
    return {}


def _heading(wanted: Show, example: dict[str, Any]) -> str:
    size, masked = len(example["pieces"]), len(example["masked"])
    source = " ".join(str(example[key]) for key in ("source", "id", "title") if example.get(key))
    follows = "no B" if example["boundary"] == size else "B is random" if example["random_next"] else "B follows A"
    figures = f"example {wanted.index}: {size} pieces, {masked} masked, {follows}"
    return f"{figures}; document {example['document']} {source}".rstrip()


def marked(example: dict[str, Any], vocabulary: Vocabulary) -> list[Text]:
    """The segments, a line each, and a legend."""
    labels = {each["position"]: vocabulary.pieces[each["piece"]] for each in example["masked"]}
    segments = {"A": Text("A  "), "B": Text("B  ")}
    for position, piece in enumerate(example["pieces"]):
        text = segments["A" if position < example["boundary"] else "B"]
        now, was = vocabulary.pieces[piece], labels.get(position)
        style = _style(position, now, was, example)
        shown = now if was is None else f"{was}→{now}" if style != "kept" else f"={was}="
        glue = "" if shown.startswith("##") or len(text) == 3 else " "
        text.append(glue).append(shown.removeprefix("##") if was is None else shown, STYLES.get(style))
    legend = (
        Text("masked ")
        .append("word→[MASK]", STYLES["masked"])
        .append("  replaced ")
        .append("word→other", STYLES["replaced"])
    )
    legend.append("  kept ").append("=word=", STYLES["kept"])
    return [segments["A"], *([segments["B"]] if len(segments["B"]) > 3 else []), legend]


def _style(position: int, now: str, was: str | None, example: dict[str, Any]) -> str:
    if was is None:
        return "special" if position in (0, example["boundary"] - 1, len(example["pieces"]) - 1) else ""
    return "masked" if now == MASK else "kept" if now == was else "replaced"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
