"""Chooses and numbers the documents that become examples: the steps between tokens and examples.

unique     copies of earlier documents are left out             where --drop-copies is given
distinct   near copies of earlier documents are left out        --near-copies
limited    documents are left out of a source that is too large  --max-share
passages   are cut out for validation                           where documents are too few to hold some out
(split)    documents are held out for validation, those with much in common together  with --near-copies
weighed    documents for training are repeated, or left out     --weight

The files that are kept stay as they are: what changes is written anew, into the work folder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, replacing
from data_prep.examples import sifting
from data_prep.examples.parts import HELD_OUT, PARTS
from data_prep.examples.sifting import ROWS, SiftTask
from data_prep.near_copies.finding import GROUPS, LOOSE, group_near_copies, mark_near_copies
from data_prep.running import Runner, Step
from data_prep.settings import Settings
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, WORK
from data_prep.vocabulary.tokens import list_token_files
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import TokensRecord

LEAVE_OUT_COPIES = Step("unique", sifting.leave_out_copies, TokensRecord, "pieces", after=sifting.delete_replaced)
LEAVE_OUT_NEAR = Step("distinct", sifting.leave_out_near_copies, TokensRecord, "pieces", after=sifting.delete_replaced)
LEAVE_OUT_SHARE = Step("limited", sifting.leave_out_share, TokensRecord, "pieces", after=sifting.delete_replaced)
CUT_PASSAGES = Step("passages", sifting.cut_passages, TokensRecord, "pieces")  # what it reads is read in each start
WEIGH = Step("weighed", sifting.weigh, TokensRecord, "pieces")  # several tasks read a file

MARKED, SPLIT = "marked", "split"
"""Steps without tasks: copies are found, and documents are chosen for validation."""
HELD_OUT_ONCE = f"{WORK}/held-out-once.npy"  # the numbers that documents held out have before any is repeated
NOTHING_LEFT = "--weight: leaves no document for training; take larger weights, and another --out"

Tokens = Iterable[TokensRecord]
More = Callable[[], Iterable[dict[str, Any]]]


class Chosen(NamedTuple):
    """The documents that become examples."""

    once: Tokens
    """The files of documents before any document is repeated."""
    parts: Tokens
    """The files that examples are made of."""
    num_held_out: int


@dataclass(frozen=True)
class Choosing:
    """Chooses among the documents of a run with its settings."""

    runner: Runner
    settings: Settings
    vocabulary: Vocabulary

    @property
    def folder(self) -> Path:
        """Names the output folder."""
        return self.runner.work.out

    def choose(self, tokens: Tokens) -> Chosen:
        """Leaves out, cuts, holds out and repeats documents by the settings; writes the tables that examples read."""
        require_text(tokens)
        for leave_out in (self._drop_copies, self._drop_near_copies, self._limit_shares):
            tokens = leave_out(tokens)
        if self._has_groups:
            group_near_copies(self.runner, tokens, self.vocabulary, self._digests(tokens))
        tokens = self._cut_passages(tokens)
        if not self.runner.work.is_finished(SPLIT):
            self._save(HELD_OUT_ONCE, self._hold_out(tokens))
            self.runner.work.finish(SPLIT)
        once, held_out = tokens, np.load(self.folder / HELD_OUT_ONCE)
        if self.settings.weights:
            tokens, held_out = self._weigh(once, held_out)
        self._save(HELD_OUT, held_out)
        list_token_files(self.folder, PARTS, tokens)
        return Chosen(once, tokens, len(held_out))

    def write_documents(self, chosen: Tokens) -> FileRecord:
        """Writes the table of all documents, in which the number of a document is its row."""

        def batches() -> Iterator[pa.RecordBatch]:
            for record in (record for record in chosen if record.documents):
                batch = map_batches(self.folder / record.path).get_batch(0)
                names = pa.array([record.source] * batch.num_rows, pa.string())
                yield pa.record_batch([batch["id"], batch["title"], names], schema=DOCUMENTS_SCHEMA)

        return write_batches(self.folder, DOCUMENTS, DOCUMENTS_SCHEMA, batches(), compression="zstd")

    def _sift(self, step: Step[SiftTask, TokensRecord], tokens: Tokens, more: More = lambda: repeat({})) -> Tokens:
        """Runs a step on all files of token documents; `more` yields further arguments of its tasks."""
        unknown = self.vocabulary.special.unk

        def tasks() -> Iterator[SiftTask]:
            firsts = accumulate((record.documents for record in tokens), initial=0)
            for number, (record, first, extra) in enumerate(zip(tokens, firsts, more(), strict=False)):
                own = {"first": first, "seed": self.settings.seed, **extra}
                yield SiftTask(self.folder, number, record.pieces, step.name, record, unknown, **own)

        return self.runner.run(step, tasks)

    def _digests(self, tokens: Tokens) -> Iterator[Array]:
        """Goes through the digests of all documents, file by file."""
        for record in tokens:
            if record.documents:  # a copy, so that the file is not mapped on
                yield np.array(map_batches(self.folder / record.path).get_batch(0)["digest"])

    @property
    def _has_groups(self) -> bool:
        """Tells whether documents that have much in common are held out together."""
        return self.settings.validation > 0 and (self.settings.near_copies or 0) > LOOSE

    def _grouped_digests(self, tokens: Tokens) -> Iterator[Array]:
        """Goes through the digests of all documents, of which a group has the same one."""
        if not self._has_groups:
            return self._digests(tokens)
        groups = np.memmap(self.folder / GROUPS, np.uint64, "r")
        return (groups[at : at + ROWS] for at in range(0, len(groups), ROWS))

    def _drop_copies(self, tokens: Tokens) -> Tokens:
        if not self.settings.drop_copies:
            return tokens
        if not self.runner.work.is_finished(MARKED):
            num_documents = sum(record.documents for record in tokens)
            sifting.mark_copies(self.folder, lambda: self._digests(tokens), num_documents)
            self.runner.work.finish(MARKED)
        return self._sift(LEAVE_OUT_COPIES, tokens)

    def _drop_near_copies(self, tokens: Tokens) -> Tokens:
        threshold = self.settings.near_copies
        if threshold is None:
            return tokens
        mark_near_copies(self.runner, tokens, self.vocabulary, threshold)
        return self._sift(LEAVE_OUT_NEAR, tokens)

    def _limit_shares(self, tokens: Tokens) -> Tokens:
        if not self.settings.max_shares:
            return tokens
        pieces: Counter[str] = Counter()
        for record in tokens:
            pieces[record.source] += record.pieces
        shares = sifting.compute_shares(pieces, self.settings.max_shares)
        return self._sift(LEAVE_OUT_SHARE, tokens, lambda: ({"kept_share": shares[one.source]} for one in tokens))

    def _cut_passages(self, tokens: Tokens) -> Tokens:
        """Cuts passages for validation where documents are few."""
        s = self.settings
        num_documents = sum(record.documents for record in tokens)
        num_sentences = sum(record.sentences for record in tokens)
        passages = sifting.choose_passages(num_documents, num_sentences, s.validation, s.seed)
        if not passages:
            return tokens
        copied = sifting.find_copied_texts(self._digests(tokens), self._grouped_digests(tokens))
        return self._sift(CUT_PASSAGES, tokens, lambda: sifting.divide_passages(tokens, passages, copied))

    def _hold_out(self, tokens: Tokens) -> Array:
        """Chooses the documents held out for validation: the passages that were cut, where there are such."""
        s = self.settings
        if any(record.books is not None for record in tokens):
            return _numbers_of_rows(tokens)
        num_documents = sum(record.documents for record in tokens)
        return sifting.choose_held_out(lambda: self._grouped_digests(tokens), num_documents, s.validation, s.seed)

    def _weigh(self, tokens: Tokens, held_out: Array) -> tuple[Tokens, Array]:
        """Repeats documents for training; returns what comes of them, and the numbers of those held out then."""
        totals: Counter[str] = Counter()
        for record, rows in _rows_held_out(tokens, held_out):
            totals[record.source] += record.documents - len(rows)

        def tasks() -> Iterator[SiftTask]:
            number, before = 0, Counter[str]()
            for record, rows in _rows_held_out(tokens, held_out):
                source, times = record.source, self.settings.weights.get(record.source, 1.0)
                trained = (before[source], totals[source])
                before[source] += record.documents - len(rows)
                files, special, seed = math.ceil(times), self.vocabulary.special, self.settings.seed
                own: dict[str, Any] = {"times": times, "trained": trained, "held_out": rows, "seed": seed}
                for share in range(files):
                    own["share"] = (share, files)
                    yield SiftTask(self.folder, number, record.pieces, WEIGH.name, record, special.unk, **own)
                    number += 1

        weighed = self.runner.run(WEIGH, tasks)
        numbers = _numbers_of_rows(weighed)
        if sum(record.documents for record in weighed) == len(numbers):
            raise UserError(NOTHING_LEFT)
        return weighed, numbers

    def _save(self, name: str, numbers: Array) -> None:
        with replacing(self.folder / name) as file:
            np.save(file, numbers)


def require_text(tokens: Tokens) -> None:
    """Raises UserError where no document has any piece."""
    if not sum(record.documents for record in tokens):
        raise UserError("no document has any text in it once it is cut into pieces")


def _rows_held_out(tokens: Tokens, held_out: Array) -> Iterator[tuple[TokensRecord, tuple[int, ...]]]:
    """Goes through files of documents, each with its rows that are held out."""
    first = 0
    for record in tokens:
        low, high = np.searchsorted(held_out, [first, first + record.documents])
        yield record, tuple((held_out[low:high] - first).tolist())
        first += record.documents


def _numbers_of_rows(tokens: Tokens) -> Array:
    """Numbers the documents that the records say are held out, by their rows in the files."""
    firsts = accumulate((record.documents for record in tokens), initial=0)
    rows = (first + np.array(record.held_out, np.int64) for first, record in zip(firsts, tokens, strict=False))
    return np.unique(np.concatenate([np.empty(0, np.int64), *rows]))
