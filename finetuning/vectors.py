"""Files of vectors: those of the texts of a file, and the texts that are nearest to queries.

Vectors are written in the order of the texts, some thousands at once, with a record beside the file: the checksums of
the model and of the texts, and the rows that are on the disk. After a stop the same command goes on there, and makes
the same bytes. Memory holds one stretch of texts, and in a search one of queries.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table, replacing, sha256, writable, write_json
from data_prep.common.launchers import World
from finetuning.flags import Numbers, Predict
from finetuning.prediction import DIGITS, TextFields, choose_numbers
from finetuning.running.base import compute_checksum
from pretraining.checkpoint.models import StoredModel
from pretraining.processes.group import choose_device
from pretraining.scoring.embedding import Embedder
from pretraining.scoring.retrieval import BLOCK, Ranking, prepare

ROWS, CHARACTERS = 4096, 1 << 22
"""Texts and characters whose vectors are computed together."""
NEAREST = 10
"""The number of texts that answer a query."""
ANSWER = ("rank", "row", "score", "text")
HEADER = 128
"""Bytes before the vectors of a .npy."""


class OneText(TextFields):
    """Rows of one text, which other columns may stand beside."""

    task = {"fields": ("text",)}  # noqa: RUF012


Item = TypeVar("Item")
Read = Callable[[Path], Iterable[str]]
"""Reads the texts of a file."""


class VectorFile:
    """The vectors of the texts of a file by a model, written and searched."""

    def __init__(self, folder: Path, wanted: Predict, read: Read) -> None:
        assert wanted.vectors is not None
        self.texts, self.out, self._read, self._replace = wanted.files[0], wanted.vectors, read, wanted.replace
        if self.out.suffix not in (".npy", ".parquet"):
            raise UserError(f"--vectors {self.out}: should end in .npy or .parquet")
        device, model = choose_device("auto", World()), StoredModel.open(str(folder))
        dtype: Numbers = "fp32" if wanted.dtype == "auto" else wanted.dtype
        computes = choose_numbers(dtype, device, model.shape)
        checksum = compute_checksum(model.vocabulary, model.shape, model.encoder)
        self.embedder = Embedder.open(model, device, computes, in_bytes=dtype == "int8")
        way = self.embedder.way
        made = f"{checksum} {way.pooling.how} {way.pooling.normalizes} {way.length} {dtype}"
        self._made = {"model": made, "text": f"{sha256(self.texts)} {wanted.format}"}
        """what the vectors are made of, by the names of messages"""
        self._record = self.out.with_name(f"{self.out.name}.json")
        self._unfinished = self.out.with_name(f".{self.out.name}.part")

    def write(self) -> None:
        """Writes the vectors, from where an earlier call was stopped; nothing if all are there."""
        done = self._count_done()
        if done is None:
            return
        if done:
            print(f"{self.out}: goes on after {done:,} texts", file=sys.stderr)
        with writable(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self._unfinished.open("r+b" if done else "w+b") as file:
                rows = self._append(file, done)
                file.seek(0)
                file.write(make_header(rows, self.embedder.width))
                os.fsync(file.fileno())
            if self.out.suffix == ".npy":
                self._unfinished.replace(self.out)
            else:
                write_parquet(self.out, np.load(self._unfinished, mmap_mode="r"))
                self._unfinished.unlink()

    def _count_done(self) -> int | None:
        """Counts the rows of a file that is not finished; None for all. Raises UserError if they are of another model
        or other texts, or if something else has made the file."""
        finished = not self._unfinished.exists()
        if finished and not self.out.exists():
            return 0
        found = read_table(self._record) if self._record.exists() else {}
        other = [name for name, checksum in self._made.items() if found.get(name) != checksum]
        if not other:
            return None if finished else int(found["rows"])
        if (found or finished) and not self._replace:
            said = f"is of another {other[0]}" if found else "exists, and no record beside it says what made it"
            raise UserError(f"--vectors {self.out}: {said}; name another file, or give --replace")
        return 0

    def _append(self, file: BinaryIO, done: int) -> int:
        """Writes the vectors of the texts after so many; returns the number of all."""
        file.truncate(HEADER + 4 * done * self.embedder.width)
        file.seek(0, os.SEEK_END)
        for texts in cut_stretches(itertools.islice(self._read(self.texts), done, None), len):
            rows = range(done, done + len(texts))
            file.write(prepare(self.embedder.compute(texts), True, f"{self.texts}: row", rows).tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += len(texts)
            write_json(self._record, {**self._made, "rows": done})
        if not done:
            raise UserError(f"{self.texts}: no texts")
        return done

    def find_nearest(self, queries: Path) -> Iterator[dict[str, Any]]:
        """Yields for each query the texts with the nearest vectors, by the products of all, or their cosine."""
        vectors, by_dot = self._open(), self.embedder.way.by_dot
        for asked in cut_stretches(self._read(queries), len):
            own = prepare(self.embedder.compute(asked), by_dot, f"{queries}: query", asked)
            ranking = Ranking(len(asked), NEAREST)
            for first in range(0, len(vectors), BLOCK):
                block = np.asarray(vectors[first : first + BLOCK])
                ranking.add_block(own, prepare(block, by_dot, f"{self.out}: row", range(first, first + BLOCK)), first)
            wanted = {*ranking.rows.ravel().tolist()}
            texts = {row: text for row, text in enumerate(self._read(self.texts)) if row in wanted}
            for query, rows, scores in zip(asked, ranking.rows.tolist(), ranking.scores.tolist(), strict=True):
                best = enumerate(zip(rows, scores, strict=True), 1)
                found = ((rank, row, round(score, DIGITS), texts[row]) for rank, (row, score) in best if row in texts)
                yield {"query": query, "nearest": [dict(zip(ANSWER, each, strict=True)) for each in found]}

    def _open(self) -> Array:
        """Maps the file of vectors; UserError if it is not the one that was written."""
        if self.out.suffix != ".npy":
            raise UserError(f"--nearest: searches a .npy, not {self.out}")
        try:
            vectors: Array = np.load(self.out, mmap_mode="r")
        except (ValueError, OSError) as error:
            raise UserError(f"{self.out}: cannot be read: {error}; write it anew, with --replace") from error
        wanted = int(read_table(self._record)["rows"]), self.embedder.width
        if vectors.shape != wanted or vectors.dtype != np.float32:
            raise UserError(
                f"{self.out}: {vectors.dtype} of shape {vectors.shape}, where {wanted} in float32 was written"
            )
        return vectors


def cut_stretches(rows: Iterable[Item], size: Callable[[Item], int], most: int | None = None) -> Iterator[list[Item]]:
    """Cuts rows into stretches of at most ROWS, or `most`, and of some CHARACTERS; `size` counts those of a row."""
    stretch: list[Item] = []
    characters = 0
    for row in rows:
        stretch.append(row)
        characters += size(row)
        if len(stretch) == (most or ROWS) or characters >= CHARACTERS:
            yield stretch
            stretch, characters = [], 0
    if stretch:
        yield stretch


def make_header(rows: int, width: int) -> bytes:
    """Makes the header of a .npy of vectors, which has the same size for any number of rows."""
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + f"{said:<{HEADER - 11}}\n".encode()


def write_parquet(path: Path, vectors: Array) -> None:
    """Writes vectors as Parquet, with the columns row and vector."""
    kind = pa.list_(pa.float32(), vectors.shape[1])
    schema = pa.schema({"row": pa.int64(), "vector": kind})
    with replacing(path) as file, pq.ParquetWriter(file, schema) as writer:
        for first in range(0, len(vectors), BLOCK):
            block = np.asarray(vectors[first : first + BLOCK])
            column = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), type=kind)
            writer.write_table(pa.table([pa.array(np.arange(first, first + len(block))), column], schema))
