"""Chooses, once all documents are in pieces, which of them examples are made of, and which are held out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, replacing
from data_prep.examples.parts import HELD_OUT, PARTS, write_parts
from data_prep.examples.sifting import (
    SiftTask,
    choose_passages,
    cut_passages,
    delete_replaced,
    kept_shares,
    leave_out_copies,
    leave_out_share,
    mark_copies,
)
from data_prep.examples.validation import choose_held_out
from data_prep.running import Runner
from data_prep.settings import Settings
from data_prep.shards import map_batches
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import Record, Records

UNIQUE, LIMITED, CUT = "unique", "limited", "passages"  # the steps that choose, each where it is wanted or needed
MARKED, SPLIT = "marked", "split"  # what is done at once: the copies are found, and the documents are divided


@dataclass(frozen=True)
class Selection:
    """The choice among the documents of a corpus."""

    runner: Runner
    folder: Path
    """The output folder."""
    settings: Settings
    vocabulary: Vocabulary

    def sift(self, tokens: Records, sources: Callable[[], Iterable[str]]) -> Records:
        """Leaves out what the user wants left out, and cuts passages for validation where documents are few.

        `sources` goes through the names of the sources of the files of token documents.
        """
        s = self.settings
        if not count(tokens, "documents"):
            raise UserError("no document has any text in it once it is cut into pieces")
        if s.drop_copies:
            if not self.runner.work.is_finished(MARKED):
                mark_copies(self.folder, lambda: self._digests(tokens), count(tokens, "documents"))
                self.runner.work.finish(MARKED)
            tokens = self._sifted(UNIQUE, leave_out_copies, tokens)
        if s.max_shares:
            pieces: Counter[str] = Counter()
            for source, record in zip(sources(), tokens, strict=True):
                pieces[source] += record["pieces"]
            shares = kept_shares(pieces, s.max_shares)
            tokens = self._sifted(
                LIMITED, leave_out_share, tokens, lambda: ({"kept_share": shares[source]} for source in sources())
            )
        passages = choose_passages(count(tokens, "documents"), count(tokens, "sentences"), s.validation, s.seed)
        if not passages:
            return tokens
        digests, counts = np.unique(np.concatenate([*self._digests(tokens)]), return_counts=True)
        copied = tuple(digests[counts > 1].tolist())
        return self._sifted(CUT, cut_passages, tokens, lambda: passages_of(tokens, passages, copied))

    def _sifted(
        self,
        step: str,
        function: Callable[[SiftTask], Record],
        tokens: Records,
        more: Callable[[], Iterable[dict[str, Any]]] = lambda: repeat({}),
    ) -> Records:
        """Runs a step on all files of token documents; `more` says what its tasks need besides."""
        unknown = self.vocabulary.special.unk

        def tasks() -> Iterator[SiftTask]:
            first = 0
            for number, (record, extra) in enumerate(zip(tokens, more(), strict=False)):
                yield SiftTask(
                    self.folder, step, number, record, unknown, **{"first": first, "seed": self.settings.seed, **extra}
                )
                first += record["documents"]

        after = delete_replaced if step != CUT else lambda _: None  # of which the digests are looked at again
        return self.runner.run(step, function, tasks, "pieces", after=after)

    def split(self, tokens: Records) -> tuple[str, int]:
        """Numbers the documents and chooses those held out for validation.

        Returns what stands for the corpus as it is then, and how many documents are held out.
        """
        work, num_documents = self.runner.work, count(tokens, "documents")
        if not work.is_finished(SPLIT):
            write_parts(self.folder, ((path, record["documents"], record["pieces"]) for path, record in filled(tokens)))
            with replacing(self.folder / HELD_OUT) as file:
                np.save(file, self._held_out(tokens, num_documents))
            work.finish(SPLIT)
        checksums = [FileRecord.of(self.folder, name).sha256 for name in (PARTS, HELD_OUT)]
        return hash_of(*checksums, self.vocabulary.sha256), len(np.load(self.folder / HELD_OUT, mmap_mode="r"))

    def _held_out(self, tokens: Records, num_documents: int) -> Array:
        """Lists the numbers of the documents held out: the passages that were cut, where there are such."""
        cut = [(record["documents"], record["held_out"]) for record in tokens if "held_out" in record]
        if not cut:
            s = self.settings
            return choose_held_out(lambda: self._digests(tokens), num_documents, s.validation, s.seed)
        firsts = np.cumsum([0, *(documents for documents, _ in cut)])
        numbers = [first + np.array(rows, np.int64) for first, (_, rows) in zip(firsts, cut, strict=False)]
        return np.unique(np.concatenate(numbers))

    def _digests(self, tokens: Records) -> Iterator[Array]:
        """Goes through the digests of all documents, file by file."""
        for path, _ in filled(tokens):
            yield np.array(map_batches(self.folder / path).get_batch(0)["digest"])  # a copy: the file is not mapped on


def filled(tokens: Records) -> Iterator[tuple[str, Record]]:
    """Finds the files of token documents that have any, with their records."""
    for record in tokens:
        if record["documents"]:
            yield record["files"][0]["path"], record


def count(records: Records, name: str) -> int:
    """Adds up one of the counts of all records."""
    return sum(record[name] for record in records)


def passages_of(tokens: Records, passages: list[tuple[int, int]], copied: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Divides passages among the files that they are in; their beginnings count from those of the files then."""
    first = 0
    for record in tokens:
        end = first + record["sentences"]
        own = tuple((start - first, size) for start, size in passages if first <= start < end)
        yield {"passages": own, "copied": copied}
        first = end


def hash_of(*parts: str) -> str:
    """Makes a short name that stands for all the parts together."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
