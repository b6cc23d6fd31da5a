"""Finds what show.py shows of a folder: a training example, laid out as a reader would mark it, or a document.

A document is found among those kept in pieces, by its title or its number. Masked, replaced and kept pieces have
colours of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tyro
from rich.text import Text

from data_prep.arrow_files import map_batches, read_batch, read_shard
from data_prep.common.errors import DamageError, UserError
from data_prep.common.sections import Removed
from data_prep.origins import Origin, find_origins_of_folder
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, Manifest, ShardSet, example_schema
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import make_token_schema
from data_prep.vocabulary.vocabulary import Vocabulary


@dataclass(frozen=True)
class Wanted:
    """Prints a training example or a document of a folder of shards, or makes a page about the folder.

        python data_prep/show.py data/wiki --length 128 --index 7

    The colours mark what is masked, replaced and kept.
    """

    removed: ClassVar = {
        "duplicate": Removed(0, "duplicates differ in their masks alone"),
        "validation": Removed(False, "examples held out are made like the others"),
    }
    data: Annotated[Path, tyro.conf.Positional]
    """The folder that shard.py wrote."""
    length: int | None = None
    """Length of the examples (default: the shortest there is)."""
    index: int = 0
    """Which example, from 0."""
    document: str | None = None
    """Print the document of this title, or of this number, instead of an example."""
    report: bool = False
    """Write report.html into the folder, a page about all of it, instead."""


@dataclass(frozen=True)
class ShownExample:
    """A training example."""

    pieces: list[int]
    labels: dict[int, int]
    """The pieces that stood at the masked positions."""
    boundary: int
    random_next: bool
    document: int
    source: str = ""
    """Where the text comes from: source, id and title of the document, as far as they are known."""


def find_example(wanted: Wanted) -> tuple[ShownExample, Vocabulary]:
    """Reads an example and the vocabulary that its pieces are of; raises UserError where there is no such example."""
    manifest, folder, row = Manifest.read(wanted.data), wanted.data, wanted.index
    manifest.require_examples(folder)
    sets = manifest.sets()
    length = min(shards.length for shards in sets) if wanted.length is None else wanted.length
    chosen = ShardSet(length, 0)
    if chosen not in sets:
        lengths = sorted({shards.length for shards in sets})
        raise UserError(f"--length {length}: {folder} has no such examples; there is {', '.join(map(str, lengths))}")
    total = sum(record.rows for record in sets[chosen])
    if not 0 <= row < total:
        raise UserError(f"--index {row}: {chosen.folder} has {total:,} examples, 0 to {total - 1}")
    for record in sets[chosen]:
        if row < record.rows:
            break
        row -= record.rows
    batch = read_examples(record.find(folder), manifest, length, record.rows)
    example = read_example(batch, row, length, folder / record.path)
    rows = read_document_rows(folder, [example.document])
    vocabulary = load_vocabulary(folder, manifest.vocabulary.cased)
    require_known([*example.pieces, *example.labels.values()], vocabulary, f"{folder}: example {wanted.index} has")
    return replace(example, source=name_document(rows.get(example.document, {}))), vocabulary


def require_known(pieces: Iterable[int], vocabulary: Vocabulary, subject: str) -> None:
    """Raises DamageError, whose sentence begins with a subject and a verb, where the vocabulary lacks a piece."""
    if max(pieces, default=0) >= len(vocabulary):
        raise DamageError(f"{subject} a piece beyond its {vocabulary.file}")


def read_examples(path: Path, manifest: Manifest, length: int, rows: int) -> pa.RecordBatch:
    """Maps a shard of examples of a length; raises DamageError unless it has the columns and the number of rows."""
    batch = read_shard(path, full=True)
    if batch.schema != example_schema(length, manifest.vocabulary_size, manifest.num_documents):
        raise DamageError(f"{path}: its columns are not those of an example of length {length}:\n{batch.schema}")
    if batch.num_rows != rows:
        raise DamageError(f"{path}: {batch.num_rows:,} examples, its record says {rows:,}")
    return batch


def read_kept(path: Path, rows: int, vocabulary_size: int) -> pa.RecordBatch:
    """Maps a file of documents in pieces; raises DamageError unless it has the columns and the number of rows."""
    batch = read_batch(map_batches(path), 0, path)
    if batch.schema != make_token_schema(vocabulary_size):
        raise DamageError(f"{path}: its columns are not those of documents in pieces")
    if batch.num_rows != rows:
        raise DamageError(f"{path}: {batch.num_rows:,} documents, its record says {rows:,}")
    return batch


def read_example(batch: pa.RecordBatch, row: int, length: int, path: Path) -> ShownExample:
    """Reads a row as an example; raises DamageError where it cannot be one."""
    for name in ("pieces", "masked"):
        size = batch[name].offsets[row + 1].as_py() - batch[name].offsets[row].as_py()
        if size > length:
            raise DamageError(f"{path}: example {row} has {size:,} {name}, longer than its length")
    values = {name: batch[name][row].as_py() for name in ("pieces", "boundary", "random_next", "document")}
    return ShownExample(**values, labels={mask["position"]: mask["piece"] for mask in batch["masked"][row].as_py()})


def name_document(row: Mapping[str, str]) -> str:
    """Names a document by its source, id and title, as far as it has these."""
    return " ".join(row[name] for name in ("source", "id", "title") if row.get(name))


def read_document_rows(folder: Path, numbers: Iterable[int]) -> dict[int, dict[str, str]]:
    """Reads the rows of the table of documents that have these numbers, as far as there are such, in one pass."""
    path = folder / DOCUMENTS
    reader = map_batches(path)
    wanted, found, first = sorted(set(numbers)), dict[int, dict[str, str]](), 0
    for index in range(reader.num_record_batches):
        if not wanted:
            break
        batch = read_batch(reader, index, path)
        if batch.schema != DOCUMENTS_SCHEMA:
            raise DamageError(f"{path}: its columns are not those of documents")
        at = bisect_left(wanted, first + batch.num_rows)
        here, wanted = wanted[:at], wanted[at:]
        rows = batch.take(pa.array([number - first for number in here], pa.int64())).to_pylist()
        found |= zip(here, rows, strict=True)
        first += batch.num_rows
    return found


STYLES = {"masked": "bold magenta", "replaced": "bold red", "kept": "bold green", "special": "dim"}


def describe_example(index: int, example: ShownExample) -> str:
    """Describes an example: its size, its masks, its segment B and its document."""
    size = len(example.pieces)
    follows = "no B" if example.boundary == size else "B is random" if example.random_next else "B follows A"
    figures = f"example {index}: {size} pieces, {len(example.labels)} masked, {follows}"
    return f"{figures}; document {example.document} {example.source}".rstrip()


class MarkedPiece(NamedTuple):
    """A piece of an example, and whether it was masked, replaced or kept."""

    segment: Literal["A", "B"]
    style: str
    """A key of STYLES; "" for plain text."""
    was: str
    """The original piece."""
    now: str
    """The piece that the model reads."""
    spelling: str
    """The piece without what marks its place in a word; one to be predicted with what the model reads in its place."""
    is_glued: bool
    """Whether no blank stands before it: it continues a word, or is the first of its segment."""


def mark_pieces(example: ShownExample, vocabulary: Vocabulary) -> Iterator[MarkedPiece]:
    """Yields the pieces of an example with their styles."""
    mask, separator = vocabulary.special.mask, vocabulary.special.sep
    for position, piece in enumerate(example.pieces):
        original = example.labels.get(position, piece)
        now, was = vocabulary.spell_alone(piece), vocabulary.spell_alone(original)
        if position not in example.labels:
            style = "special" if position == 0 or piece == separator else ""
        else:
            style = "masked" if piece == mask else "kept" if now == was else "replaced"
        spelling = {"masked": f"{was}→{now}", "replaced": f"{was}→{now}", "kept": f"={was}="}.get(style)
        segment: Literal["A", "B"] = "A" if position < example.boundary else "B"
        is_close = style != "kept" and bool(vocabulary.is_close[original])
        begins = position in (0, example.boundary)
        yield MarkedPiece(segment, style, was, now, spelling or vocabulary.spell([piece]), begins or is_close)


def format_example(example: ShownExample, vocabulary: Vocabulary) -> list[Text]:
    """Writes the segments on a line each, with what stood at masked positions, and a legend."""
    segments = {"A": Text("A  "), "B": Text("B  ")}
    for piece in mark_pieces(example, vocabulary):
        segments[piece.segment].append("" if piece.is_glued else " ").append(piece.spelling, STYLES.get(piece.style))
    samples = {"masked": f"word→{vocabulary.special_pieces.mask}", "replaced": "word→other", "kept": "=word="}
    legend = Text("  ").join(Text(f"{style} ").append(sample, STYLES[style]) for style, sample in samples.items())
    return [segments["A"], *([segments["B"]] if len(segments["B"]) > 3 else []), legend]


class KeptDocument(NamedTuple):
    """A document in pieces."""

    source: str
    id: str
    title: str
    sentences: list[list[int]]

    def lines(self, vocabulary: Vocabulary) -> Iterator[str]:
        """Yields a heading, then the sentences, with the pieces of a word joined."""
        count = sum(map(len, self.sentences))
        case = "with case" if vocabulary.cased else "in lower case"
        name = " ".join(filter(None, (self.source, self.id, self.title)))
        yield f"{name}: {len(self.sentences):,} sentences, {count:,} pieces, {case}"
        for sentence in self.sentences:
            yield vocabulary.spell(sentence)


def find_document(folder: Path, wanted: str) -> tuple[KeptDocument, Vocabulary]:
    """Finds the document of a title, or of a number as examples and the table of documents have it."""
    manifest = Manifest.read(folder)
    origins = list(find_origins_of_folder(folder, str(folder)))
    found = list(_find_rows(_map_documents(origins), title=wanted))
    if not found and wanted.isdecimal():
        found = _find_by_number(folder, manifest, origins, int(wanted))[:1]
    if not found:
        raise UserError(f"--document {wanted}: {folder} has no document of just this title")
    if len(found) > 1:
        raise UserError(f"--document {wanted}: {len(found):,} documents have this title; give the number of one")
    path, source, row = found[0]
    batch = read_batch(map_batches(path), 0, path)
    document = KeptDocument(source, *(batch[name][row].as_py() for name in ("id", "title", "sentences")))
    vocabulary = load_vocabulary(folder, manifest.vocabulary.cased)
    require_known(chain.from_iterable(document.sentences), vocabulary, f"{folder}: document {wanted} has")
    return document, vocabulary


Place = tuple[Path, str, int]  # a file of documents, its source, and a row of it


def _find_by_number(folder: Path, manifest: Manifest, origins: list[Origin], number: int) -> list[Place]:
    """Finds the document of a number, by the table of documents if some were left out, cut or repeated."""
    if manifest.figures and not 0 <= number < manifest.num_documents:
        raise UserError(f"--document {number}: {folder} has {manifest.num_documents:,} documents, from 0")
    total = sum(file.rows for origin in origins for file in origin.manifest.kept)
    if not manifest.figures or total == manifest.num_documents:
        for path, source, batch in _map_documents(origins):
            if number < batch.num_rows:
                return [(path, source, number)]
            number -= batch.num_rows
        return []
    row = read_document_rows(folder, [number]).get(number)
    if row is None:
        raise DamageError(f"{folder / DOCUMENTS}: no row {number:,}; its manifest says {manifest.num_documents:,} rows")
    wanted = {name: row[name] for name in ("id", "title")}
    files = ((path, source, batch) for path, source, batch in _map_documents(origins) if source == row["source"])
    return list(_find_rows(files, **wanted))


def _map_documents(origins: list[Origin]) -> Iterator[tuple[Path, str, pa.RecordBatch]]:
    """Goes through the files of documents, in the order of the corpus; raises DamageError where one is damaged."""
    for origin in origins:
        for record in origin.manifest.kept:
            path = record.find(origin.folder)
            yield path, record.source, read_kept(path, record.rows, origin.manifest.vocabulary_size)


def _find_rows(files: Iterable[tuple[Path, str, pa.RecordBatch]], **wanted: str) -> Iterator[Place]:
    """Finds the rows of files that have all the values that are wanted."""
    for path, source, batch in files:
        fits = np.ones(batch.num_rows, bool)
        for name, value in wanted.items():
            fits &= np.asarray(pc.equal(batch[name], value))
        yield from ((path, source, row) for row in np.flatnonzero(fits).tolist())
