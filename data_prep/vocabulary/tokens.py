"""Steps 2 and 3: counts the words of the documents for the vocabulary, then cuts the documents into pieces."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_list_offsets, make_list_type, make_schema, map_batches, write_batches
from data_prep.common.arrays import Array, smallest_type
from data_prep.common.compiled import compiled
from data_prep.common.hashing import GOLDEN, scramble_bits
from data_prep.shards import KEPT, WORK
from data_prep.vocabulary.encoders.bytelevel import put_blanks
from data_prep.vocabulary.encoders.encoder import TextEncoder
from data_prep.vocabulary.kinds.declaration import find_kind, load_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import Record, TokensRecord

MOST_WORDS = 2_000_000  # different words that the vocabulary is trained from
COUNTS_SCHEMA = make_schema(word=pa.string(), count=pa.int64())
LIST_SCHEMA = make_schema(path=pa.string(), source=pa.string(), documents=pa.int64(), pieces=pa.int64())

scramble = compiled(scramble_bits)
INCREMENT = np.uint64(GOLDEN)
Kind = TypeVar("Kind", bound="TokenFiles")


@dataclass(frozen=True)
class PartTask:
    """Asks a worker for one file of documents: to count its words, or to cut it into pieces."""

    folder: Path
    """The output folder."""
    path: str
    """Where the file of documents is, relative to the output folder."""
    weight: int
    """The number of bytes of text of the documents."""
    cased: bool
    tokenizer: str | None
    """The kind of the vocabulary; None for the usual one."""
    source: str = ""
    vocabulary_sha256: str = ""
    """The checksum of the vocabulary that cuts the text into pieces; empty where words are counted."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step, and from the same one with another vocabulary."""
        vocabulary = f"-{self.vocabulary_sha256[:8]}" if self.vocabulary_sha256 else ""
        return f"{Path(self.path).stem}{vocabulary}"

    def target(self, folder: str) -> str:
        """Names the file that the task writes, which lies in a folder as the file of documents does in its own."""
        return f"{folder}/{Path(self.path).parent.name}/{self.name}.arrow"


@dataclass(frozen=True)
class TokenFiles:
    """All files of token documents that have any, in the order of the corpus."""

    paths: pa.StringArray
    sources: pa.StringArray
    """The names of the sources that their texts are from."""
    firsts: Array
    """The numbers of the documents with which the files begin; at the end, how many documents there are."""
    pieces: Array
    """The number of pieces of every file."""

    @classmethod
    def read(cls: type[Kind], path: Path, *more: Any) -> Kind:
        """Maps the list into memory; `more` are the further fields of the class."""
        batch = map_batches(path).get_batch(0)
        firsts = np.concatenate([[0], np.cumsum(np.asarray(batch["documents"]))]).astype(np.int64)
        return cls(batch["path"], batch["source"], firsts, np.asarray(batch["pieces"]), *more)

    @property
    def num_documents(self) -> int:
        """Counts all documents."""
        return int(self.firsts[-1])

    def path(self, number: int) -> str:
        """Returns the path of a file, relative to the output folder."""
        return str(self.paths[number].as_py())

    def find(self, documents: Array) -> Array:
        """Finds the files that documents are in."""
        return np.searchsorted(self.firsts, documents, side="right") - 1


class Corpus(NamedTuple):
    """The documents of one file, cut into pieces, as flat arrays that compiled code reads."""

    pieces: Array  # (pieces,)
    sentence_ends: Array  # (sentences,) where every sentence ends in pieces
    document_ends: Array  # (documents,) where every document ends in sentence_ends
    first: int  # the number of the first document
    books: Array  # (documents,) the number of the book of which every document is a passage, or the document itself


def count_part(task: PartTask) -> Record:
    """Counts how often every word occurs in one file of documents, and writes the counts into a file."""
    kind, column = find_kind(task.tokenizer), map_batches(task.folder / task.path).get_batch(0)["sentences"]
    counts = kind.count_words(*_view_sentences(column, kind.vocabulary.has_blanks), task.cased)
    batch = pa.record_batch([list(counts), list(counts.values())], schema=COUNTS_SCHEMA)
    return Record(files=[write_batches(task.folder, task.target(f"{WORK}/words"), COUNTS_SCHEMA, [batch])])


def add_up(paths: Iterable[Path]) -> dict[str, int]:
    """Adds up the counts of several files; drops the rarest words where there are more than fit into memory."""
    total: dict[str, int] = {}
    for path in paths:
        batch = map_batches(path).get_batch(0)
        for word, count in zip(batch["word"].to_pylist(), batch["count"].to_pylist(), strict=True):
            total[word] = total.get(word, 0) + count
        if len(total) > MOST_WORDS:
            kept = heapq.nsmallest(MOST_WORDS // 2, total.items(), key=lambda item: (-item[1], item[0]))
            total = dict(kept)
    return total


def make_token_schema(vocabulary_size: int) -> pa.Schema:
    """Makes the schema of files of token documents, with the smallest type that holds the ids of the pieces.

    The digest of the pieces of a document decides whether it is held out for validation.
    """
    sentence = make_list_type(pa.from_numpy_dtype(smallest_type(vocabulary_size - 1)))
    return make_schema(id=pa.string(), title=pa.string(), sentences=make_list_type(sentence), digest=pa.uint64())


def encode_part(task: PartTask) -> TokensRecord:
    """Cuts one file of documents into pieces; drops sentences and documents that are left without any."""
    vocabulary, encoder = _load_encoder(task.folder, task.cased, task.vocabulary_sha256)
    batch = map_batches(task.folder / task.path).get_batch(0)
    column = batch["sentences"]
    pieces = encoder.encode(*_view_sentences(column, vocabulary.has_blanks))
    sentence_ends, document_ends = _drop_empty(pieces.ends, np.asarray(column.offsets)[1:])
    filled = np.diff(document_ends, prepend=0) > 0
    document_ends = document_ends[filled]
    schema = make_token_schema(len(vocabulary))
    inner = schema.field("sentences").type.value_type
    ids = pa.array(pieces.ids.astype(inner.value_type.to_pandas_dtype()))
    sentences = pa.ListArray.from_arrays(
        make_list_offsets(document_ends), pa.ListArray.from_arrays(make_list_offsets(sentence_ends), ids)
    )
    digests = hash_documents(pieces.ids, sentence_ends, document_ends)
    kept = batch.select(["id", "title"]).filter(pa.array(filled))
    out = pa.record_batch(
        [kept["id"], kept["title"], sentences.cast(schema.field("sentences").type), pa.array(digests)], schema=schema
    )
    return TokensRecord(
        files=[write_batches(task.folder, task.target(KEPT), schema, [out])],
        source=task.source,
        documents=len(document_ends),
        empty=len(filled) - len(document_ends),
        sentences=len(sentence_ends),
        pieces=len(pieces.ids),
        unknown=int(np.count_nonzero(pieces.ids == vocabulary.special.unk)),
        characters=pieces.characters,
        unknown_characters=pieces.lost,
        text_bytes=task.weight,
    )


def read_corpus(path: Path, first: int) -> Corpus:
    """Maps a file of token documents into memory as flat arrays; `first` is the number of its first document."""
    batch = map_batches(path).get_batch(0)
    column = batch["sentences"]
    sentences = column.values
    books = np.array(batch["book"]) if "book" in batch.schema.names else np.arange(len(column), dtype=np.uint32)
    ends = np.asarray(sentences.offsets)[1:], np.asarray(column.offsets)[1:]
    return Corpus(np.asarray(sentences.values), *ends, np.int64(first), books)


def list_token_files(folder: Path, name: str, tokens: Iterable[TokensRecord]) -> None:
    """Writes the paths, sources and sizes of the files of token documents, for all tasks."""
    filled = [(one.path, one.source, one.documents, one.pieces) for one in tokens if one.documents]
    columns = [
        pa.array(values, field.type) for values, field in zip(zip(*filled, strict=True), LIST_SCHEMA, strict=True)
    ]
    write_batches(folder, name, LIST_SCHEMA, [pa.record_batch(columns, schema=LIST_SCHEMA)])


@functools.lru_cache(maxsize=1)
def _load_encoder(folder: Path, cased: bool, sha256: str) -> tuple[Vocabulary, TextEncoder]:
    """Loads a vocabulary and its encoder, which keeps the words that it has cut; a worker loads them once."""
    vocabulary = load_vocabulary(folder, cased)
    assert vocabulary.sha256 == sha256
    return vocabulary, vocabulary.encoder()


def _view_sentences(documents: pa.ListArray, has_blanks: bool) -> tuple[Array, Array]:
    """Returns the bytes of all sentences, and where each ends in them.

    With blanks, a sentence that follows another of its document begins with one, as in a running text.
    """
    text, ends = _view_text(documents.values)
    if not has_blanks:
        return text, ends
    offsets, follows = np.asarray(documents.offsets), np.ones(len(ends), bool)
    follows[offsets[:-1][np.diff(offsets) > 0]] = False
    text, ends = put_blanks(text, ends, follows)
    return text, ends


def _view_text(sentences: pa.StringArray) -> tuple[Array, Array]:
    """Returns the bytes of strings, and where every string ends in them, without a copy."""
    _, offsets, data = sentences.buffers()
    ends = np.frombuffer(offsets, np.int32)[1 : len(sentences) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text[: ends[-1] if len(ends) else 0], ends


def _drop_empty(piece_ends: Array, document_ends: Array) -> tuple[Array, Array]:
    """Drops sentences without pieces; returns where the others end, and where the documents end among them."""
    filled = np.diff(piece_ends, prepend=0) > 0
    return piece_ends[filled], np.concatenate([[0], np.cumsum(filled)])[document_ends]


@compiled
def hash_documents(pieces: Array, sentence_ends: Array, document_ends: Array) -> Array:
    """Hashes the pieces of every document into 64 bits, so that copies of a text are known by their digests."""
    digests = np.empty(document_ends.size, np.uint64)
    at = 0
    for document in range(document_ends.size):
        value = INCREMENT
        stop = sentence_ends[document_ends[document] - 1]
        while at < stop:
            value = scramble(value ^ np.uint64(pieces[at])) + INCREMENT
            at += 1
        digests[document] = scramble(value)
    return digests
