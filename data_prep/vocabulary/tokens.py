"""Steps 2 and 3: the words of the documents are counted for the vocabulary, then the documents are cut into pieces."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array, smallest_type
from data_prep.common.compiled import compiled
from data_prep.common.files import FileRecord
from data_prep.examples.pairs import Corpus
from data_prep.examples.streams import GOLDEN, mix
from data_prep.shards import WORK, list_offsets, map_batches, write_batches
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, count_words, load_vocabulary
from data_prep.vocabulary.wordpiece import FastWordPiece
from data_prep.vocabulary.words import WordTable


@dataclass(frozen=True)
class PartTask:
    """Work on one file of documents."""

    folder: Path
    name: str
    path: str
    """the file of documents"""
    weight: int
    """bytes of text"""
    cased: bool
    vocabulary_sha256: str = ""


def token_schema(vocabulary_size: int) -> pa.Schema:
    """Documents as sentences of pieces; the digest of a document's pieces decides whether it is held out."""
    piece = pa.field("item", pa.from_numpy_dtype(smallest_type(vocabulary_size - 1)), nullable=False)
    sentence = pa.field("item", pa.list_(piece), nullable=False)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("title", pa.string(), nullable=False),
            pa.field("sentences", pa.list_(sentence), nullable=False),
            pa.field("digest", pa.uint64(), nullable=False),
        ]
    )


COUNTS_SCHEMA = pa.schema(
    [pa.field("word", pa.string(), nullable=False), pa.field("count", pa.int64(), nullable=False)]
)
MOST_WORDS = 2_000_000  # different words that the vocabulary is trained from


def count_part(task: PartTask) -> dict[str, Any]:
    """The words of one file of documents, and how often each occurs."""
    text, ends = _text_of(map_batches(task.folder / task.path).get_batch(0)["sentences"].values)
    table = WordTable(task.cased)
    numbers, _ = table.number(text, ends)
    counts = count_words(numbers, table.words(), task.cased)
    batch = pa.record_batch([list(counts), list(counts.values())], schema=COUNTS_SCHEMA)
    return {"files": [write_batches(task.folder, f"{WORK}/words/{task.name}.arrow", COUNTS_SCHEMA, [batch]).as_json()]}


def add_up(paths: Iterable[Path]) -> dict[str, int]:
    """The counts of several files together, without the rarest words where they are too many to keep."""
    total: dict[str, int] = {}
    for path in paths:
        batch = map_batches(path).get_batch(0)
        for word, count in zip(batch["word"].to_pylist(), batch["count"].to_pylist(), strict=True):
            total[word] = total.get(word, 0) + count
        if len(total) > MOST_WORDS:
            kept = heapq.nsmallest(MOST_WORDS // 2, total.items(), key=lambda item: (-item[1], item[0]))
            total = dict(kept)
    return total


def encode_part(task: PartTask) -> dict[str, Any]:
    """Cuts one file of documents into pieces. Sentences and documents that are left without any are dropped."""
    vocabulary, encoder = _encoder(task.folder / VOCABULARY, task.cased, task.vocabulary_sha256)
    batch = map_batches(task.folder / task.path).get_batch(0)
    column = batch["sentences"]
    pieces = encoder.encode(*_text_of(column.values))
    sentence_ends, document_ends = _without_empty(pieces.ends, np.asarray(column.offsets)[1:])
    filled = np.diff(document_ends, prepend=0) > 0
    document_ends = document_ends[filled]
    schema = token_schema(len(vocabulary))
    inner = schema.field("sentences").type.value_type
    ids = pa.array(pieces.ids.astype(inner.value_type.to_pandas_dtype()))
    sentences = pa.ListArray.from_arrays(
        list_offsets(document_ends), pa.ListArray.from_arrays(list_offsets(sentence_ends), ids)
    )
    digests = _digests(pieces.ids, sentence_ends, document_ends)
    kept = batch.filter(pa.array(filled))
    out = pa.record_batch(
        [kept["id"], kept["title"], sentences.cast(schema.field("sentences").type), pa.array(digests)], schema=schema
    )
    record = write_batches(task.folder, f"{WORK}/tokens/{task.name}.arrow", schema, iter([out]))
    return {
        "files": [record.as_json()],
        "documents": len(document_ends),
        "empty": int(len(filled) - len(document_ends)),
        "sentences": len(sentence_ends),
        "pieces": len(pieces.ids),
        "unknown": int(np.count_nonzero(pieces.ids == vocabulary.special.unk)),
        "text_bytes": task.weight,
    }


def read_corpus(path: Path, first: int) -> Corpus:
    """A file of token documents as flat arrays; `first` is the number of its first document."""
    column = map_batches(path).get_batch(0)["sentences"]
    sentences = column.values
    return Corpus(
        np.asarray(sentences.values), np.asarray(sentences.offsets)[1:], np.asarray(column.offsets)[1:], np.int64(first)
    )


@functools.lru_cache(maxsize=1)
def _encoder(path: Path, cased: bool, sha256: str) -> tuple[Vocabulary, FastWordPiece]:
    """Kept from task to task, with the words that it has learned."""
    vocabulary = load_vocabulary(path, cased)
    assert vocabulary.sha256 == sha256
    return vocabulary, FastWordPiece(vocabulary.pipeline(), cased)


def _text_of(sentences: pa.StringArray) -> tuple[Array, Array]:
    """The bytes of some strings, and where each ends."""
    _, offsets, data = sentences.buffers()
    ends = np.frombuffer(offsets, np.int32)[1 : len(sentences) + 1].astype(np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return text[: ends[-1] if len(ends) else 0], ends


def _without_empty(piece_ends: Array, document_ends: Array) -> tuple[Array, Array]:
    """The ends of the sentences that have pieces, and the ends of all documents among those."""
    filled = np.diff(piece_ends, prepend=0) > 0
    before = np.concatenate([[0], np.cumsum(filled)])
    return piece_ends[filled], before[document_ends]


@compiled
def _digests(pieces, sentence_ends, document_ends):
    """64 bits of hash of the pieces of each document: the same text, the same digest."""
    digests = np.empty(document_ends.size, np.uint64)
    at = 0
    for document in range(document_ends.size):
        value = GOLDEN
        stop = sentence_ends[document_ends[document] - 1]
        while at < stop:
            value = mix(value ^ np.uint64(pieces[at])) + GOLDEN
            at += 1
        digests[document] = mix(value)
    return digests


def token_file(record: dict[str, Any]) -> FileRecord:
    """The file that a record of encode_part speaks of."""
    return FileRecord(**record["files"][0])
