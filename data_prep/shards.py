"""The contract between data preparation and everything after it: what a folder of shards holds.

    DATA/
      manifest.json                                what was made from what, with every file's checksum and counts
      vocab.txt  tokenizer.json                    the vocabulary, for us and for transformers
      documents.arrow                              number (= row), id, title and source of every document
      length-128/duplicate-0/shard-00000.arrow     training examples, shuffled over the whole corpus
      length-128/validation/shard-00000.arrow      examples of the documents held out

A shard is one Arrow record batch, so that a reader maps it into memory and finds any row at once. A row is an example:

    pieces        `[CLS] A [SEP] B [SEP]` as the model reads it: masks applied, no padding
    masked        the predicted positions, ascending, with the pieces that stood there
    boundary      where B begins (segment 1); the length of `pieces` where there is no B
    random_next   the NSP label: whether B was drawn from another document
    document      the number of the document that A comes from
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array, smallest_type
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, is_inside, json_bytes, read_json, replacing
from data_prep.common.forms import COUNT, Check, find_fault, whole
from data_prep.common.languages import DEFAULT

FORMAT = 1
LATER: dict[str, Any] = {"extend": 0, "formulas": "drop", "drop_copies": False, "max_share": {}}
"""Settings that earlier versions had not, with what they did in all folders then."""
LATER_FIGURES = ("text", "own", "lost_parted", "parted")
"""Figures of a set of shards that follow from its settings and text, and that earlier versions had not."""
MANIFEST = "manifest.json"
PATH = Check("a path in the folder", lambda value: isinstance(value, str) and is_inside(value))
FILE_FORM = {"path": PATH, "size": COUNT, "rows": COUNT, "sha256": str}
SET_FORM = {
    "length": whole(1, 2**16),
    "duplicate": COUNT,
    "validation": bool,
    **dict.fromkeys(("examples", "pieces", "masked", "random_next"), COUNT),
    "histogram": [COUNT],
    "shards": [FILE_FORM],
}
FORM = {
    "settings": {"pairs": str},
    "sources": [dict],
    "given_vocabulary": object,
    "corpus": {"documents": whole(1), "validation_documents": COUNT},
    "bytes": COUNT,
    "fingerprint": str,
    "vocabulary": {"size": whole(1, 2**31), "sha256": str, "cased": bool},
    "files": [FILE_FORM],
    "sets": [SET_FORM],
}
"""What is relied on of a manifest."""
KEYS = frozenset(FORM)
DOCUMENTS = "documents.arrow"
WORK = ".cloze-work"  # the folder of what a run needs until it is finished
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, MemoryError, TypeError, OverflowError)
"""What is raised where a file is not the Arrow file that it claims to be."""
PLAN = f"{WORK}/plan.json"  # there from the beginning of a run to its end

DOCUMENTS_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, order=True)
class ShardSet:
    """A set of shards: those of one length and one masking duplicate, or of the documents held out for validation."""

    length: int
    duplicate: int
    validation: bool = False

    @classmethod
    def of(cls, content: dict[str, Any]) -> ShardSet:
        """Reads the set from an entry of a manifest, which has its figures too."""
        return cls(content["length"], content["duplicate"], content["validation"])

    @property
    def folder(self) -> str:
        """Names the folder of the set, relative to the output folder."""
        return f"{length_folder(self.length)}/" + ("validation" if self.validation else f"duplicate-{self.duplicate}")

    def shard(self, index: int) -> str:
        """Names a shard by its path, relative to the output folder."""
        return f"{self.folder}/shard-{index:05}.arrow"


def length_folder(length: int) -> str:
    """Names the folder of all shards of one length, relative to the output folder."""
    return f"length-{length}"


def example_schema(length: int, vocabulary_size: int, num_documents: int) -> pa.Schema:
    """Gives the columns of the shards of one length, in the smallest types that hold their numbers."""
    piece = pa.from_numpy_dtype(smallest_type(vocabulary_size - 1))
    position = pa.from_numpy_dtype(smallest_type(length))
    masked = pa.struct([pa.field("position", position, nullable=False), pa.field("piece", piece, nullable=False)])
    return pa.schema(
        [
            pa.field("pieces", pa.list_(pa.field("item", piece, nullable=False)), nullable=False),
            pa.field("masked", pa.list_(pa.field("item", masked, nullable=False)), nullable=False),
            pa.field("boundary", position, nullable=False),
            pa.field("random_next", pa.bool_(), nullable=False),
            pa.field("document", pa.from_numpy_dtype(smallest_type(num_documents - 1)), nullable=False),
        ]
    )


def write_batches(
    folder: Path, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str | None = None
) -> FileRecord:
    """Writes an Arrow file a record batch at a time, so that it is never in memory as a whole; returns its record."""
    rows, options = 0, pa.ipc.IpcWriteOptions(compression=compression)
    with replacing(folder / name) as file:
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
    return FileRecord.of(folder, name, rows)


def example_batch(schema: pa.Schema, pieces: Lists, positions: Array, labels: Lists, *others: Array) -> pa.RecordBatch:
    """Makes a record batch of examples from flat arrays.

    `positions` has the place in its example of every piece of `labels`; `others` are the columns that remain.
    """
    item = schema.field("masked").type.value_type
    masked = pa.StructArray.from_arrays([pa.array(positions), pa.array(labels.values)], fields=list(item))
    columns = [
        pa.ListArray.from_arrays(list_offsets(pieces.ends), pa.array(pieces.values), type=schema.field("pieces").type),
        pa.ListArray.from_arrays(list_offsets(labels.ends), masked, type=schema.field("masked").type),
        *(pa.array(column, field.type) for column, field in zip(others, list(schema)[2:], strict=True)),
    ]
    return pa.record_batch(columns, schema=schema)


class Lists(NamedTuple):
    """Lists of numbers, stored one after another, as Arrow stores them."""

    values: Array  # the numbers of all lists
    ends: Array  # where every list ends in them


def list_offsets(ends: Array) -> pa.Array:
    """Turns the ends of lists into the offsets that Arrow has for lists, which begin with a zero."""
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return pa.array(offsets)


def map_batches(path: Path) -> pa.RecordBatchFileReader:
    """Maps an Arrow file into memory, of which nothing is read yet; raises DamageError where it is not whole."""
    try:
        if not path.is_file():
            raise DamageError(f"{path}: missing, or no file")
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except UNREADABLE as error:
        if isinstance(error, DamageError):
            raise
        raise DamageError(f"{path}: not a whole Arrow file: {error}") from error


def read_batch(reader: pa.RecordBatchFileReader, index: int, path: Path, full: bool = True) -> pa.RecordBatch:
    """Takes a record batch of a mapped file; raises DamageError unless its columns lie within the file.

    `full` says whether the offsets within columns are looked at too, half a millisecond for a shard of 75 MB.
    """
    try:
        batch = reader.get_batch(index)
        batch.validate(full=full)
        if nulls := sum(map(_nulls, batch.columns)):
            raise DamageError(f"{path}: damaged: {nulls:,} values that are none")
    except UNREADABLE as error:
        if isinstance(error, DamageError):
            raise
        raise DamageError(f"{path}: damaged: {error}") from error
    return batch


def _nulls(column: pa.Array) -> int:
    """Counts the values of a column that are none, within lists and structures too; Cloze writes no such value."""
    inner = [column.values] if pa.types.is_list(column.type) else []
    if pa.types.is_struct(column.type):
        inner = [column.field(index) for index in range(column.type.num_fields)]
    return int(column.null_count) + sum(map(_nulls, inner))


def read_shard(path: Path, full: bool = False) -> pa.RecordBatch:
    """Maps a shard into memory; raises DamageError where it is none.

    Unless `full`, its offsets are not looked at: whoever reads rows by them must check them first.
    """
    reader = map_batches(path)
    try:
        count = reader.num_record_batches
    except UNREADABLE as error:
        raise DamageError(f"{path}: not a whole Arrow file: {error}") from error
    if count != 1:
        raise DamageError(f"{path}: {count} record batches; a shard has one")
    return read_batch(reader, 0, path, full)


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says of a finished folder of shards."""

    content: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a finished folder; raises UserError where the folder is anything else."""
        try:
            content = read_json(folder / MANIFEST)
        except FileNotFoundError:
            if not folder.is_dir():
                raise UserError(f"{folder}: no such folder") from None
            if is_unfinished(folder):
                raise UserError(f"{folder}: not finished; run the same shard.py command again to continue") from None
            raise UserError(f"{folder}: no {MANIFEST}: not a folder of shards (make one with shard.py)") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"{folder / MANIFEST}: not of format {FORMAT}, the one that this version reads")
        if missing := FORM.keys() - content.keys():
            raise DamageError(f"{folder / MANIFEST}: lacks {', '.join(sorted(missing))}: it was edited")
        if fault := find_fault(content, FORM):
            raise DamageError(f"{folder / MANIFEST}: {fault}: it was edited or is damaged")
        return cls(content)

    @property
    def fingerprint(self) -> str:
        """Stands for the data as a whole: another fingerprint means other settings, vocabulary or examples."""
        return str(self.content["fingerprint"])

    @property
    def vocabulary_size(self) -> int:
        """Counts the pieces of the vocabulary."""
        return int(self.content["vocabulary"]["size"])

    @property
    def num_documents(self) -> int:
        """Counts the rows of the table of documents, where a passage that was cut out for validation has its own."""
        corpus = self.content["corpus"]
        return int(corpus.get("passages", corpus["documents"]))

    def lengths(self) -> list[int]:
        """Lists the lengths of the training examples, the shortest first."""
        return sorted({shards.length for shards in self.sets() if not shards.validation})

    def length_for(self, length: int) -> int | None:
        """Finds the length whose examples serve for a wanted one: the same, or the next longer, to be cut."""
        return next((stored for stored in self.lengths() if stored >= length), None)

    @property
    def has_pairs(self) -> bool:
        """Tells whether examples are pairs of segments, for next-sentence prediction."""
        return bool(self.content["settings"]["pairs"] != "none")

    def files(self) -> list[FileRecord]:
        """Lists the records of all files of the folder but the manifest itself."""
        return self.tables() + [record for shards in self.sets().values() for record in shards]

    def tables(self) -> list[FileRecord]:
        """Lists the records of the files that are no shards: the vocabulary and the table of documents."""
        return [file_record(record) for record in self.content["files"]]

    def sets(self) -> dict[ShardSet, list[FileRecord]]:
        """Lists the records of the shards of every set, in their order."""
        return {ShardSet.of(said): [file_record(record) for record in said["shards"]] for said in self.content["sets"]}


def file_record(said: dict[str, Any]) -> FileRecord:
    """Reads the record of a file from a manifest."""
    return FileRecord(said["path"], said["size"], said["rows"], said["sha256"])


def seal(content: dict[str, Any]) -> None:
    """Adds to a manifest what tells later changes to it: the fingerprint of the data, and a checksum of all it says."""
    content["fingerprint"] = fingerprint(content)
    content["checksum"] = checksum(content)


def checksum(content: dict[str, Any]) -> str:
    """Hashes all that a manifest says but this."""
    return hashlib.sha256(json_bytes({key: value for key, value in content.items() if key != "checksum"})).hexdigest()


def fingerprint(content: dict[str, Any]) -> str:
    """Hashes all that a manifest says, apart from names that are none of the content, and the fingerprint itself.

    The checksums of the shards are in it, so what earlier versions had not need not be: the keys of the sources, and
    some figures.
    """
    others = ("fingerprint", "versions", "vocabulary_source", "checksum")
    parts = {key: value for key, value in content.items() if key not in others}
    parts["settings"] = meant(parts["settings"])
    parts["sources"] = [{name: said for name, said in file.items() if name != "content"} for file in parts["sources"]]
    parts["sets"] = [{name: said for name, said in one.items() if name not in LATER_FIGURES} for one in parts["sets"]]
    return hashlib.sha256(json_bytes(parts)).hexdigest()


def meant(settings: dict[str, Any]) -> dict[str, Any]:
    """Spells recorded settings so that those of equal shards are equal, also those of earlier versions.

    A language that is not given is the one whose rules are taken for it; earlier versions had not all of the settings.
    """
    known = {name: value for name, value in settings.items() if name not in LATER or value != LATER[name]}
    return {**known, "language": settings.get("language") or DEFAULT}


def is_unfinished(folder: Path) -> bool:
    """Tells whether a run began in the folder and has not finished: it has a plan and no manifest."""
    return not (folder / MANIFEST).exists() and (folder / PLAN).exists()
