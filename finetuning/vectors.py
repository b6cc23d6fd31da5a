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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import read_table, replacing, sha256, writable, write_json
from data_prep.common.locks import locked
from data_prep.readers.reader import group_rows
from finetuning.flags import Format
from finetuning.prediction import DIGITS, TextEmbedder
from pretraining.scoring.retrieval import BLOCK, Ranking, normalize_vectors

ROWS, CHARACTERS = 4096, 1 << 22
"""Texts and characters whose vectors are computed together."""
NEAREST = 10
"""The number of texts that answer a query."""
HEADER = 128
"""Bytes before the vectors of a .npy."""
Read = Callable[[Path], Iterable[str]]
"""Reads the texts of a file."""


class VectorFile:
    """The vectors of the texts of a file by a model, written and searched."""

    def __init__(self, model: TextEmbedder, texts: Path, kind: Format, out: Path, read: Read) -> None:
        """`kind`: the format of the texts, which `read` reads."""
        self.texts, self.out, self.embedder, self._read = texts, out, model.embedder, read
        self._row = 4 * self.embedder.width
        self._made = {"model": model.describe(), "text": f"{sha256(texts)} {kind}"}
        """what the vectors are made of, by the names of messages"""
        self.record, self._unfinished, self._lock = (
            out.with_name(name.format(out.name)) for name in ("{}.json", ".{}.part", ".{}.lock")
        )

    def write(self, replace: bool) -> None:
        """Writes the vectors, from where an earlier call was stopped; nothing if all are there."""
        if self._count_done(replace) is None:
            return
        with locked(self._lock, f"--vectors {self.out}", "{owner} writes it"), writable(self.out):
            done = self._count_done(replace) or 0
            if done:
                print(f"{self.out}: goes on after {done:,} texts", file=sys.stderr)
            rows = self._append(done)
            self._write(0, make_header(rows, self.embedder.width), rows)
            if self.out.suffix == ".npy":
                self._unfinished.replace(self.out)
            else:
                write_parquet(self.out, np.load(self._unfinished, mmap_mode="r"))
                self._unfinished.unlink()

    def _count_done(self, replace: bool) -> int | None:
        """Counts the rows of a file that is not finished; None for all. Raises UserError if they are of another model
        or other texts, or if something else has made the file."""
        finished = not self._unfinished.exists()
        if finished and not self.out.exists():
            return 0
        found = read_table(self.record) if self.record.exists() else {}
        other = [name for name, checksum in self._made.items() if found.get(name) != checksum]
        if not other:
            if finished:
                return None
            return max(0, min(int(found["rows"]), (self._unfinished.stat().st_size - HEADER) // self._row))
        if (found or finished) and not replace:
            said = f"is of another {other[0]}" if found else "exists, and no record beside it says what made it"
            raise UserError(f"--vectors {self.out}: {said}; name another file, or give --replace")
        return 0

    def _append(self, done: int) -> int:
        """Writes the vectors of the texts after so many; returns the number of all."""
        for texts in group_rows(itertools.islice(self._read(self.texts), done, None), len, CHARACTERS, ROWS):
            rows = range(done, done + len(texts))
            vectors = normalize_vectors(self.embedder.compute(texts), True, f"{self.texts}: row", rows)
            if done:
                self._write(HEADER + self._row * done, vectors.tobytes(), rows.stop)
            else:
                self._begin(vectors)
            done = rows.stop
            write_json(self.record, {**self._made, "rows": done})
        if not done:
            raise UserError(f"{self.texts}: no texts")
        return done

    def _begin(self, vectors: Array) -> None:
        """Makes the unfinished file; before it is on the disk, an older file keeps its record."""
        with replacing(self._unfinished) as file:
            file.write(bytes(HEADER) + vectors.tobytes())
            file.flush()
            os.fsync(file.fileno())
            self.record.unlink(missing_ok=True)

    def _write(self, place: int, content: bytes, rows: int) -> None:
        """Writes bytes at a place of the unfinished file, which ends after so many rows."""
        with self._unfinished.open("r+b") as file:
            file.seek(place)
            file.write(content)
            file.truncate(HEADER + self._row * rows)
            os.fsync(file.fileno())

    def find_nearest(self, queries: Path) -> Iterator[dict[str, Any]]:
        """Yields for each query the texts with the nearest vectors, by the products of all, or their cosine."""
        vectors, by_dot = self._open(), self.embedder.pooling.by_dot
        for asked in group_rows(self._read(queries), len, CHARACTERS, ROWS):
            own = normalize_vectors(self.embedder.compute(asked), by_dot, f"{queries}: query", asked)
            ranking = Ranking(len(asked), NEAREST)
            for first in range(0, len(vectors), BLOCK):
                block = np.asarray(vectors[first : first + BLOCK])
                rows = range(first, first + BLOCK)
                ranking.add_block(own, normalize_vectors(block, by_dot, f"{self.out}: row", rows), first)
            wanted = {*ranking.rows.ravel().tolist()}
            texts = {row: text for row, text in enumerate(self._read(self.texts)) if row in wanted}
            for query, *best in zip(asked, ranking.rows.tolist(), ranking.scores.tolist(), strict=True):
                nearest = [
                    {"rank": rank, "row": row, "score": round(score, DIGITS), "text": texts[row]}
                    for rank, (row, score) in enumerate(zip(*best, strict=True), 1)
                    if row in texts
                ]
                yield {"query": query, "nearest": nearest}

    def _open(self) -> Array:
        """Maps the file of vectors; UserError if it is not the one that was written."""
        wanted = (int(read_table(self.record)["rows"]), self.embedder.width)
        try:
            vectors: Array = np.load(self.out, mmap_mode="r")
            if vectors.shape != wanted or vectors.dtype != np.float32:
                raise ValueError(f"{vectors.dtype} of shape {vectors.shape}, where {wanted} in float32 was written")
        except (ValueError, OSError) as error:
            raise UserError(f"{self.out}: cannot be read: {error}; delete it, and give the command again") from error
        return vectors


def make_header(rows: int, width: int) -> bytes:
    """Makes the header of a .npy of vectors, which has the same size for any number of rows."""
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + f"{said:<{HEADER - 11}}\n".encode()


def write_parquet(path: Path, vectors: Array) -> None:
    """Writes vectors as Parquet, with the columns row and vector; a mapped file is not loaded whole."""
    column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), vectors.shape[1])
    with replacing(path) as file:
        pq.write_table(pa.table({"row": np.arange(len(vectors)), "vector": column}), file, row_group_size=BLOCK)
