"""Reads sentences with a tag for each word.

Three kinds of files: columns, as CoNLL-2003 has them (a word a line with its tag in the last column, an empty line
after a sentence), and Parquet and JSON lines with a list of words and a list of tags in every row. Where a file parts
its documents, it does so by a sentence that begins with -DOCSTART-.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.errors import UserError
from data_prep.readers.reader import unpacked_name
from data_prep.readers.tables import open_parquet, read_objects, read_text
from finetuning.files.splits import choose_held_out

HUB_TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")
"""Tags of CoNLL-2003 on the Hugging Face hub by number, for files that do not name them."""
DOCUMENT = "-DOCSTART-"


class Fields(NamedTuple):
    """Column names of words and tags in Parquet and JSON lines; the first column of tags that is present is read."""

    words: str = "tokens"
    tags: tuple[str, ...] = ("ner_tags", "tags")
    names: Sequence[str] = ()
    """The tags by number, for files whose tags are numbers; Parquet of the hub names them itself."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a file."""

    place: str
    """The file, as messages begin: `train.txt:`."""
    line: int
    """Its first line, or its row, from 1."""
    spread: bool
    """Whether every word has a line of its own."""
    words: list[str]
    tags: list[str] | None
    """None where the file has no tags."""

    def name_place(self, word: int) -> str:
        """Names the file and line of a word."""
        return f"{self.place}{self.line + word * self.spread}"

    @property
    def parts_documents(self) -> bool:
        """Whether it is only the mark of a new document."""
        return self.words[0] == DOCUMENT


def read_sentences(paths: Sequence[Path], fields: Fields, tagged: bool) -> list[Sentence]:
    """Reads the files of a split; `tagged` refuses words without tags, which otherwise all or none of a file have."""
    sentences: list[Sentence] = []
    for path in paths:
        kind = {".parquet": _read_parquet, ".jsonl": _read_json_lines, ".json": _read_json_lines}.get(
            Path(unpacked_name(path)).suffix.lower()
        )
        found = list(_read_columns(path, fields) if kind is None else kind(path, fields))
        real = [sentence for sentence in found if not sentence.parts_documents]
        if not real:
            raise UserError(f"{path}: no sentence in the file")
        bare = [sentence for sentence in real if sentence.tags is None]
        if bare and (tagged or len(bare) < len(real)):
            columns = f"no field {' or '.join(fields.tags)}" if kind else "one column alone"
            raise UserError(f"{bare[0].name_place(0)}: {columns}: this sentence needs tags, as others of its file")
        sentences += found
    return sentences


def hold_out(place: Path, sentences: Sequence[Sentence], share: float) -> tuple[list[Sentence], list[Sentence], str]:
    """Divides the sentences of a file into training and dev sentences; returns both with a note for the user.

    Where the file marks documents, whole documents are held out, since sentences within one are similar.
    """
    by_document = any(sentence.parts_documents for sentence in sentences)
    units: list[list[Sentence]] = []
    for sentence in sentences:
        if sentence.parts_documents or not by_document or not units:
            units.append([])
        units[-1].append(sentence)
    texts = (" ".join(word for sentence in unit for word in sentence.words) for unit in units)
    chosen, note = choose_held_out(place, texts, share, "documents" if by_document else "sentences")
    train, dev = (
        [sentence for unit, is_held in zip(units, chosen, strict=True) if is_held is wanted for sentence in unit]
        for wanted in (False, True)
    )
    return train, dev, note


def _read_columns(path: Path, fields: Fields) -> Iterator[Sentence]:
    """Reads one word a line. The first word's line sets the number of columns and their separator, and may name
    them."""
    place, parted_by, columns = f"{path}:", "", 0
    words, tags = list[str](), list[str]()
    for number, line in enumerate([*read_text(path).split("\n"), ""], 1):
        is_blank, begins_document = not line or line.isspace(), line.startswith(DOCUMENT)
        if words and (is_blank or begins_document):
            yield Sentence(place, number - len(words), True, words, tags if columns > 1 else None)
            words, tags = [], []
        if begins_document:
            yield Sentence(place, number, True, [DOCUMENT], None)
        elif not is_blank:
            parted_by = parted_by or ("\t" if "\t" in line else " ")
            row = line.split(parted_by)
            if "" in row and parted_by == " ":
                row = [column for column in row if column]
            columns = columns or len(row)
            if len(row) != columns or "" in row:
                raise UserError(f"{path}:{number}: {sum(map(bool, row))} columns; the first word has {columns}")
            if number > 1 or row[-1] not in fields.tags:
                words.append(row[0])
                tags.append(row[-1])


def _read_json_lines(path: Path, fields: Fields) -> Iterator[Sentence]:
    """Reads one JSON object a line."""
    for number, row in read_objects(path):
        yield _make_sentence(row, f"{path}:", number, fields, fields.names)


def _read_parquet(path: Path, fields: Fields) -> Iterator[Sentence]:
    """Reads a table; its schema may name the numbers of its tags, as on the hub."""
    with open_parquet(path) as file:
        schema = file.schema_arrow
        table = file.read([name for name in (fields.words, *fields.tags) if name in schema.names])
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    column = next((name for name in fields.tags if name in schema.names), "")
    names = _find_names(features.get(column)) or fields.names
    for number, row in enumerate(table.to_pylist(), 1):
        yield _make_sentence(row, f"{path}: row ", number, fields, names)


def _find_names(feature: Any) -> Sequence[str] | None:
    """Finds the class names in the hub's description of a column, which wraps lists in several ways."""
    if isinstance(feature, list):
        return next(filter(None, map(_find_names, feature)), None)
    return (feature.get("names") or _find_names(feature.get("feature"))) if isinstance(feature, dict) else None


def _make_sentence(row: dict[str, Any], place: str, number: int, fields: Fields, names: Sequence[str]) -> Sentence:
    """Makes a sentence of a row; `names` maps numbers to tags."""
    where, words = f"{place}{number}", row.get(fields.words)
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UserError(f"{where}: {fields.words!r} should be a list of words, at least one")
    tags = next((row[name] for name in fields.tags if row.get(name) is not None), None)
    if tags is None or words[0] == DOCUMENT:
        return Sentence(place, number, False, words, None)
    if not isinstance(tags, list) or len(tags) != len(words):
        raise UserError(f"{where}: there should be a list of {len(words)} tags, one for each word")
    for tag in tags:
        if not (isinstance(tag, str) and tag) and not (type(tag) is int and 0 <= tag < len(names)):
            numbers = f" or a number below {len(names)}" if names else ""
            raise UserError(f"{where}: tag {tag!r}; there should be a text{numbers}")
    return Sentence(place, number, False, words, [tag if isinstance(tag, str) else names[tag] for tag in tags])
