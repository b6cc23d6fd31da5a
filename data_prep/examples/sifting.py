"""Between tokens and examples: leaves documents out, holds some or passages of them out for validation, repeats some.

Copies and near copies are left out on request, as are documents of a source that exceeds its largest share. Documents
for training are repeated by the weights of the sources.

Where a corpus has few documents, holding one of them out would take a whole book from training, and leave a book to be
its own partner. There, passages from all over the corpus are held out; each becomes a document of its own.

Each task reads a file of token documents and writes another one, unless nothing changes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import make_list_offsets, map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.common.errors import UserError
from data_prep.common.files import writable
from data_prep.common.hashing import hash_key
from data_prep.near_copies.finding import NEAR_COPIES
from data_prep.running import NumberedTask
from data_prep.settings import FEWEST_HELD_OUT, LARGEST_SHARE, count_held_out
from data_prep.shards import WORK
from data_prep.vocabulary.tokens import hash_documents, scramble
from data_prep.work import TokensRecord, make_numbered_path

COPIES = f"{WORK}/copies.u8"  # a byte for each document: whether an earlier one has the same text
DIGEST = np.dtype([("digest", np.uint64), ("number", np.int64)])
BUCKET_BYTES, MOST_BUCKETS = 128 << 20, 1000  # size of a file of digests, about, and how many files there are at most
ROWS = 4 << 20  # digests that are in memory at once
SHORTEST, USUAL, LONGEST = 20, 50, 100  # sentences of a passage: at least, where there are enough, and at most, about
NUM_RANKS = 2.0**64
MOST_COPIES = 4  # copies of a text that are held out together even if fewer documents are wanted
MARGIN = 1000  # digests that are looked at beyond those that are likely needed
Digests: TypeAlias = Callable[[], Iterable[Array]]  # goes through the digests of all documents, part by part
GROUP = 4096  # documents among which those are drawn that are there once more
BOOK = pa.field("book", pa.uint32(), nullable=False)
"""The column that numbers the document of a row: rows of one document must not be partners."""
SHARES_TOO_SMALL = "--max-share: the shares of all sources make no more than 100%; leave one without a limit"


@dataclass(frozen=True)
class SiftTask(NumberedTask):
    """Asks a worker for what is left of one file of token documents."""

    step: str
    record: TokensRecord
    """The record of the file."""
    unknown: int
    """The id of the piece for unknown words."""
    first: int = 0
    """The number of the first document, where copies are left out."""
    kept_share: float = 1.0
    """The share of the documents that stay."""
    times: float = 1.0
    """The weight: 2.5 repeats documents for training twice, and half of them once more."""
    trained: tuple[int, int] = (0, 0)
    """Documents for training of the source: how many come before this file, and how many there are."""
    held_out: tuple[int, ...] = ()
    """The rows that are held out, which are there once."""
    share: tuple[int, int] = (0, 1)
    """(number, total) of the files that the repeated documents are divided among, so that none is too large."""
    seed: int = 0
    passages: tuple[tuple[int, int], ...] = ()
    """Where passages for validation begin among the sentences of the file, and how many sentences they have."""
    copied: tuple[int, ...] = ()
    """The digests of documents that have copies, from which no passage is taken: the copy would be in training."""

    @property
    def target(self) -> str:
        """Names the file that is written where anything changes, relative to the output folder."""
        return make_numbered_path(self.step, self.number)


def leave_out_marked(marks: str, cause: str, task: SiftTask) -> TokensRecord:
    """Leaves out the documents that are marked in a file with a byte for each document of the corpus."""
    marked = np.fromfile(task.folder / marks, np.uint8, task.record.documents, offset=task.first)
    return _write_kept(task, np.logical_not(marked), cause)


leave_out_copies = partial(leave_out_marked, COPIES, "copies")
leave_out_near_copies = partial(leave_out_marked, NEAR_COPIES, "near_copies")


def leave_out_share(task: SiftTask) -> TokensRecord:
    """Keeps the share of the documents that is to stay, drawn at random."""
    kept = np.ones(task.record.documents, bool)
    if task.kept_share < 1 and len(kept):
        kept = hash_key(task.seed, 1, np.asarray(_map_batch(task)["digest"])) < np.uint64(task.kept_share * NUM_RANKS)
    return _write_kept(task, kept, "over_share")


def cut_passages(task: SiftTask) -> TokensRecord:
    """Cuts passages out of the documents: a passage and what is before and after it are documents of their own then."""
    if not task.record.documents:
        return task.record.model_copy(update={"books": 0, "held_out": ()})
    batch = _map_batch(task)
    column = batch["sentences"]
    ends = np.asarray(column.offsets)[1:].astype(np.int64)
    rows = np.searchsorted(ends, [start for start, _ in task.passages], side="right")
    single = ~np.isin(np.asarray(batch["digest"])[rows], np.array(task.copied, np.uint64))
    chosen = itertools.compress(task.passages, single)
    spans = np.array([_fit_passage(ends, *passage) for passage in chosen], np.int64).reshape(-1, 2)
    new_ends = np.unique(np.concatenate([ends, spans.ravel()]))
    new_ends = new_ends[new_ends > 0]
    books = np.searchsorted(ends, new_ends)
    sentences = pa.ListArray.from_arrays(make_list_offsets(new_ends), column.values, type=column.type)
    digests = hash_documents(np.asarray(column.values.values), np.asarray(column.values.offsets)[1:], new_ends)
    names = [batch[name].take(pa.array(books)) for name in ("id", "title")]
    schema = batch.schema.append(BOOK)
    cut = pa.record_batch([*names, sentences, pa.array(digests), pa.array(books, pa.uint32())], schema=schema)
    held_out = tuple(np.searchsorted(new_ends, spans[:, 1]).tolist())
    return _write_file(task, cut, documents=len(new_ends), books=len(ends), held_out=held_out)


def weigh(task: SiftTask) -> TokensRecord:
    """Repeats every document for training, so that its rows follow each other as one book, or leaves some out."""
    if task.times == 1 or not task.record.documents:
        return task.record.model_copy(update={"held_out": task.held_out})
    batch = _map_batch(task)
    if "book" not in batch.schema.names:
        batch = batch.append_column(BOOK, pa.array(np.arange(batch.num_rows, dtype=np.uint32)))
    books, (number, total) = np.asarray(batch["book"]), task.share
    many = int(books[-1]) + 1
    first, last = (int(np.searchsorted(books, many * one // total)) for one in (number, number + 1))
    times = np.ones(batch.num_rows, np.int64)
    training = np.ones(batch.num_rows, bool)
    training[list(task.held_out)] = False
    times[training] = draw_times(task.seed, task.times, *task.trained, int(training.sum()))
    held_out = np.array([row - first for row in task.held_out if first <= row < last], np.int64)
    batch, times = batch.slice(first, last - first), times[first:last]
    firsts = np.cumsum(times) - times
    weighed = batch.take(pa.array(np.repeat(np.arange(len(times)), times)))
    return _write_file(task, weighed, **_count_pieces(weighed, task.unknown), held_out=tuple(firsts[held_out].tolist()))


def draw_times(seed: int, weight: float, first: int, total: int, count: int) -> Array:
    """Draws how many times each of some documents is there: those from number `first` on of `total` in their source.

    All together are there `total` times the weight, rounded, and so is each group of documents that follow each other;
    which of a group are there once more is drawn. So it is the same whatever files the documents are in.
    """
    low, high = first - first % GROUP, min(total, first + count + -(first + count) % GROUP)
    numbers = np.arange(low, high)
    starts = np.arange(low, high, GROUP)
    ends = np.minimum(starts + GROUP, high)
    wanted = np.floor(ends * weight + 0.5).astype(np.int64) - np.floor(starts * weight + 0.5).astype(np.int64)
    once_more = wanted - int(weight) * (ends - starts)
    times = np.full(len(numbers), int(weight), np.int64)
    order = np.lexsort((hash_key(seed, 3, numbers), numbers // GROUP))
    times[order] += numbers % GROUP < once_more[(numbers - low) // GROUP]
    return times[first - low :][:count]


def _fit_passage(ends: Array, start: int, size: int) -> tuple[int, int]:
    """Moves a passage back where it would go beyond its document, and cuts it to the document where it is longer."""
    row = int(np.searchsorted(ends, start, side="right"))
    first, last = int(ends[row - 1]) if row else 0, int(ends[row])
    begin = max(first, min(start, last - size))
    return begin, min(begin + size, last)


def _map_batch(task: SiftTask) -> pa.RecordBatch:
    return map_batches(task.folder / task.record.path).get_batch(0)


def _write_kept(task: SiftTask, kept: Array, cause: str) -> TokensRecord:
    """Writes the documents that stay, unless all do; counts them anew, and those left out for this cause."""
    if kept.all():
        return task.record.model_copy(update={cause: 0})
    batch = _map_batch(task).filter(pa.array(kept))
    return _write_file(task, batch, **_count_pieces(batch, task.unknown), **{cause: int(np.count_nonzero(~kept))})


def _count_pieces(batch: pa.RecordBatch, unknown: int) -> dict[str, int]:
    """Counts what is in token documents, as their record has it."""
    sentences = batch["sentences"].flatten()
    pieces = np.asarray(sentences.flatten())
    found = int(np.count_nonzero(pieces == unknown))
    return {"documents": batch.num_rows, "sentences": len(sentences), "pieces": len(pieces), "unknown": found}


def _write_file(task: SiftTask, batch: pa.RecordBatch, **counts: int | tuple[int, ...]) -> TokensRecord:
    """Writes a file of token documents that takes the place of another; returns its record, with other counts."""
    file = write_batches(task.folder, task.target, batch.schema, [batch])
    return task.record.model_copy(update={"files": [file], **counts})


def delete_replaced(task: SiftTask) -> None:
    """Deletes the file of the work folder that another has taken the place of; documents that are kept stay."""
    if (task.folder / task.target).exists() and task.record.path.startswith(f"{WORK}/"):
        (task.folder / task.record.path).unlink(missing_ok=True)


def mark_copies(folder: Path, digests: Digests, num_documents: int) -> None:
    """Marks every document that has the text of an earlier one; keeps few digests in memory at a time."""
    path, buckets = folder / COPIES, folder / WORK / "digests"
    count = min(MOST_BUCKETS, -(-DIGEST.itemsize * num_documents // BUCKET_BYTES))
    with writable(path):
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_documents)
        copies = np.memmap(path, np.uint8, "r+", shape=(num_documents,))
        _divide_digests(buckets, digests, count)
        for index in range(count):
            _mark_bucket(buckets / f"{index:04}", copies)
        copies.flush()


def _divide_digests(folder: Path, digests: Digests, count: int) -> None:
    """Divides digests and the numbers of their documents among files, equal digests into the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        (folder / f"{index:04}").write_bytes(b"")
    number = 0
    for part in join_parts(digests(), ROWS):
        rows = np.empty(len(part), DIGEST)
        rows["digest"], rows["number"] = part, np.arange(number, number + len(part))
        number += len(part)
        home = ((rows["digest"] >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32)
        order = np.argsort(home, kind="stable")
        bounds = np.searchsorted(home[order], np.arange(count + 1, dtype=np.uint64))
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            with (folder / f"{index:04}").open("ab") as file:
                rows[order[bounds[index] : bounds[index + 1]]].tofile(file)


def _mark_bucket(path: Path, copies: Array) -> None:
    """Marks the copies in a file of digests: all but the first document of each digest."""
    rows = np.fromfile(path, DIGEST)
    _, firsts = np.unique(rows["digest"], return_index=True)
    copies[np.delete(rows["number"], firsts)] = 1
    path.unlink()


def compute_shares(pieces: Mapping[str, int], limits: Mapping[str, float]) -> dict[str, float]:
    """Computes the share of each source to keep, so that none exceeds its limit in the result."""
    limited: set[str] = set()
    while True:
        free = sum(count for name, count in pieces.items() if name not in limited)
        rest = 1 - sum(limits[name] for name in limited)
        if not free or rest <= 0:
            raise UserError(SHARES_TOO_SMALL)
        total = free / rest
        over = {name for name in limits.keys() - limited if pieces.get(name, 0) > limits[name] * total}
        if not over:
            return {name: limits[name] * total / pieces[name] if name in limited else 1.0 for name in pieces}
        limited |= over


def find_copied_texts(digests: Iterable[Array], groups: Iterable[Array]) -> tuple[int, ...]:
    """Lists the digests of documents that are in a group with others; those of a group have one number in `groups`."""
    _, home, counts = np.unique(np.concatenate([*groups]), return_inverse=True, return_counts=True)
    return tuple(np.unique(np.concatenate([*digests])[counts[home] > 1]).tolist())


def divide_passages(
    tokens: Iterable[TokensRecord], passages: list[tuple[int, int]], copied: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Divides passages among the files that they are in; their beginnings count from those of the files then."""
    first = 0
    for record in tokens:
        end = first + record.sentences
        own = tuple((start - first, size) for start, size in passages if first <= start < end)
        yield {"passages": own, "copied": copied}
        first = end


def choose_passages(num_documents: int, num_sentences: int, share: float, seed: int) -> list[tuple[int, int]]:
    """Chooses passages for validation where documents are too few: their first sentences, and how many they have.

    They lie apart, as far from one another as they can be all over the corpus. None are chosen where the documents are
    many enough, or all of the text is too short.
    """
    if not share or round(num_documents * share) >= FEWEST_HELD_OUT or LARGEST_SHARE * num_documents >= FEWEST_HELD_OUT:
        return []
    wanted = share * num_sentences
    count = max(FEWEST_HELD_OUT, round(wanted / LONGEST))
    size = int(min(max(USUAL, wanted / count), max(share, LARGEST_SHARE) * num_sentences / count))
    apart = num_sentences // count
    if size < SHORTEST or apart <= 3 * size:
        return []
    jitter = hash_key(seed, 2, np.arange(count)) % np.uint64(apart - 2 * size)
    return [(index * apart + size + int(jitter[index]), size) for index in range(count)]


def choose_held_out(digests: Digests, num_documents: int, share: float, seed: int) -> Array:
    """Chooses the documents for validation by the digests of all documents; returns their numbers.

    They are those whose salted digests are smallest: copies of a text have one digest, so they are held out together
    and a text in validation is in no training example. A text with very many copies stays in training, unless all are
    such. Only the digests near the smallest are in memory, never those of all documents.
    """
    wanted = count_held_out(num_documents, share)
    if wanted < 1:
        return np.empty(0, np.int64)
    salt = np.uint64(seed)
    looked_at = 1.1 * wanted + MARGIN
    while True:
        everything = looked_at >= num_documents
        limit = np.uint64(2**64 - 1) if everything else np.uint64(int(looked_at / num_documents * NUM_RANKS))
        ranks, copies = _find_smallest(digests, limit, salt, wanted)
        chosen = _take_first_texts(ranks, copies, wanted, everything)
        if chosen is not None:
            break
        looked_at *= 4
    if everything:
        chosen = chosen[: len(ranks) - 1]  # something must be left to train on
    return _list_numbers(digests, chosen, salt) if len(chosen) else np.empty(0, np.int64)


def join_parts(parts: Iterable[Array], fewest: int) -> Iterator[Array]:
    """Joins arrays that follow each other until they have so many rows."""
    waiting, count = list[Array](), 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count >= fewest:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _find_smallest(digests: Digests, limit: np.uint64, salt: np.uint64, wanted: int) -> tuple[Array, Array]:
    """Finds the different ranks up to a limit, and how many documents have each."""
    ranks, copies = np.empty(0, np.uint64), np.empty(0, np.int64)
    small = (here[here <= limit] for here in (_rank_digests(part, salt) for part in digests()))
    for some in join_parts(small, max(1 << 20, wanted)):
        fresh, counts = np.unique(some, return_counts=True)
        ranks, home = np.unique(np.concatenate([ranks, fresh]), return_inverse=True)
        copies = np.bincount(home, np.concatenate([copies, counts]), len(ranks)).astype(np.int64)
    return ranks, copies


def _take_first_texts(ranks: Array, copies: Array, wanted: int, everything: bool) -> Array | None:
    """Takes the texts of the smallest ranks until there are as many documents as wanted; None where more are needed."""
    few = copies <= max(wanted // 4, MOST_COPIES)
    if everything and not few.any():
        few = copies == copies.min()
    taken = np.cumsum(copies[few])
    if everything or (len(taken) and taken[-1] >= wanted):
        return np.asarray(ranks[few][: int(np.searchsorted(taken, wanted)) + 1])
    return None


def _list_numbers(digests: Digests, chosen: Array, salt: np.uint64) -> Array:
    """Lists the numbers of the documents that have the chosen ranks."""
    found, first = [np.empty(0, np.int64)], 0
    for part in digests():
        ranks = _rank_digests(part, salt)
        place = np.minimum(np.searchsorted(chosen, ranks), len(chosen) - 1)
        found.append(first + np.flatnonzero(chosen[place] == ranks))
        first += len(part)
    return np.concatenate(found)


@compiled
def _rank_digests(digests, seed):
    """Puts the digests in another order for every seed."""
    salt = scramble(seed)
    ranks = np.empty(digests.size, np.uint64)
    for document in range(digests.size):
        ranks[document] = scramble(digests[document] ^ salt)
    return ranks
