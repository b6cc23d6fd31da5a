"""Step 4, examples: plan, find the partners, truncate, mask, and sort by a random key.

The key makes the global shuffle: each example has one from its own stream of random numbers, the examples of a file
are stored in its order, and a shard is all the examples of the corpus in one range of keys, sorted (shuffle.py). So
shards come out uniformly shuffled over the whole corpus, and the corpus is never in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.examples.masking import Masking, mask_example, num_predictions
from data_prep.examples.pairs import Corpus, Plan, copy_second, place_partners, plan_pairs, plan_sentences, truncate
from data_prep.examples.streams import draw
from data_prep.settings import Settings
from data_prep.shards import WORK, Lists, ShardSet, example_batch, example_schema, write_batches
from data_prep.vocabulary.tokens import read_corpus
from data_prep.vocabulary.vocabulary import VOCABULARY, Special, Vocabulary, load_vocabulary

KEY = "key"
TOGETHER = 6  # sets of shards made at a time: one sweep over the partners, and memory for so many


@dataclass(frozen=True)
class Parts:
    """The files of token documents, in the order of the corpus."""

    paths: tuple[str, ...]
    firsts: tuple[int, ...]
    """the number of the first document of each"""
    num_documents: int
    held_out_sha256: str
    vocabulary_sha256: str


@dataclass(frozen=True)
class ExamplesTask:
    """Make all examples of the documents of one file, for every length and duplicate."""

    folder: Path
    part: int
    parts: Parts
    settings: Settings
    weight: int
    """pieces"""

    @property
    def name(self) -> str:
        return f"{self.part:06}"


def shard_sets(length: int, duplicates: int, validation: bool) -> list[ShardSet]:
    """The sets of one length, in the order in which a file of examples has them."""
    held_out = [ShardSet(length, 0, validation=True)] if validation else []
    return [ShardSet(length, duplicate) for duplicate in range(duplicates)] + held_out


def make_examples(task: ExamplesTask) -> dict[str, Any]:
    """Writes a file of examples for each length, with a record batch for each set of shards."""
    settings, parts = task.settings, task.parts
    corpus = read_corpus(task.folder / parts.paths[task.part], parts.firsts[task.part])
    vocabulary = _vocabulary(task.folder / VOCABULARY, settings.cased, parts.vocabulary_sha256)
    members = read_members(task.folder, parts.num_documents, parts.held_out_sha256)
    files: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    for length in settings.lengths:
        schema = example_schema(length, len(vocabulary), parts.num_documents)
        finished = _finish_sets(task, length, corpus, members, vocabulary, schema)
        name = f"{WORK}/examples/{task.name}-{length}.arrow"
        files.append(write_batches(task.folder, name, keyed_schema(schema), _noting(finished, counts)).as_json())
    return {"files": files, "counts": counts}


def _finish_sets(
    task: ExamplesTask, length: int, corpus: Corpus, members: Members, vocabulary: Vocabulary, schema: pa.Schema
) -> Iterator[Finished]:
    """The examples of each set of one length; some sets at a time, so that memory does not grow with the duplicates."""
    settings = task.settings
    pairs, rules = settings.pairs == "nsp", masking_rules(settings, length, vocabulary)
    sets = shard_sets(length, settings.duplicates, members.validation.size > 0)
    for at in range(0, len(sets), TOGETHER):
        drafts = [_draft(each, corpus, members, settings) for each in sets[at : at + TOGETHER]]
        if pairs:
            _add_partners(drafts, corpus, task)
        for draft in drafts:
            yield finish(draft, corpus, vocabulary.special, rules, schema, pairs)


def _noting(finished: Iterable[Finished], counts: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """The record batches alone; what they count is noted on the way."""
    for each in finished:
        counts.append(each.counts)
        yield each.batch


def all_sets(settings: Settings, validation: bool) -> list[ShardSet]:
    """Every set of shards that these settings make."""
    return [each for length in settings.lengths for each in shard_sets(length, settings.duplicates, validation)]


def masking_rules(settings: Settings, length: int, vocabulary: Vocabulary) -> Masking:
    """What the settings mean for examples of one length."""
    masked, random, _ = settings.mask_split
    return Masking(
        num_predictions(length, settings.mask_rate, settings.predictions(length)),
        settings.masking == "whole-word",
        vocabulary.continues(),
        vocabulary.special.mask,
        masked / 100,
        random / 100,
    )


@functools.lru_cache(maxsize=1)
def _vocabulary(path: Path, cased: bool, sha256: str) -> Vocabulary:
    vocabulary = load_vocabulary(path, cased)
    assert vocabulary.sha256 == sha256
    return vocabulary


class Members(NamedTuple):
    """The numbers of the documents for training and of those held out."""

    training: Array
    validation: Array


HELD_OUT = f"{WORK}/held-out.npy"


@functools.lru_cache(maxsize=1)
def read_members(folder: Path, num_documents: int, sha256: str) -> Members:
    """From the file of the numbers of the documents held out, which has this checksum."""
    held_out = np.load(folder / HELD_OUT)
    return Members(np.delete(np.arange(num_documents, dtype=np.uint32), held_out), held_out.astype(np.uint32))


class Draft(NamedTuple):
    """Examples of one set whose segments are known."""

    shards: ShardSet
    plan: Plan
    second: Array  # (examples, room) segment B of each


def _draft(shards: ShardSet, corpus: Corpus, members: Members, settings: Settings) -> Draft:
    first, count = int(corpus.first), corpus.document_ends.size
    numbers = np.arange(first, first + count)
    rows = np.flatnonzero(np.isin(numbers, members.validation) == shards.validation)
    pool = members.validation if shards.validation else members.training
    key = (shards.length, shards.duplicate, settings.seed, settings.short_probability)
    if settings.pairs == "nsp":
        plan, room = plan_pairs(corpus, rows, pool, *key), shards.length - 3
    else:
        plan, room = plan_sentences(corpus, rows, *key), 0
    return Draft(shards, plan, np.empty((len(plan.row), room), corpus.pieces.dtype))


def _add_partners(drafts: list[Draft], own: Corpus, task: ExamplesTask) -> None:
    """Fills in segment B of all examples: those from this file, then file by file those from elsewhere."""
    parts = task.parts
    homes = []
    for draft in drafts:
        _fill(np.flatnonzero(draft.plan.partner < 0), draft, own)
        home = np.searchsorted(np.array(parts.firsts), draft.plan.partner, side="right") - 1
        order = np.argsort(home, kind="stable")
        homes.append((order, np.searchsorted(home[order], np.arange(len(parts.paths) + 1))))
    for part, path in enumerate(parts.paths):
        if any(bounds[part] < bounds[part + 1] for _, bounds in homes):
            corpus = own if part == task.part else read_corpus(task.folder / path, parts.firsts[part])
            for draft, (order, bounds) in zip(drafts, homes, strict=True):
                chosen = order[bounds[part] : bounds[part + 1]]
                place_partners(chosen, draft.plan, corpus)
                _fill(chosen, draft, corpus)


def _fill(chosen: Array, draft: Draft, corpus: Corpus) -> None:
    truncate(chosen, draft.plan, draft.second.shape[1])
    copy_second(chosen, draft.plan, corpus, draft.second)


class Finished(NamedTuple):
    """The examples of one set of shards from one file of documents."""

    batch: pa.RecordBatch
    counts: dict[str, Any]


def keyed_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of examples that are not in shards yet."""
    return schema.append(pa.field(KEY, pa.uint64(), nullable=False))


def finish(
    draft: Draft, corpus: Corpus, special: Special, masking: Masking, schema: pa.Schema, pairs: bool
) -> Finished:
    """Puts the segments of each example together, masks it, and sorts the examples by their keys."""
    plan = draft.plan
    num_specials = 3 if pairs else 2
    sizes = (plan.a_end - plan.a_start) + (plan.b_end - plan.b_start) + num_specials
    item = schema.field("masked").type.value_type
    pieces = np.empty(sizes.sum(), schema.field("pieces").type.value_type.to_pandas_dtype())
    most = int(masking.predictions[sizes].sum())
    positions = np.empty(most, item.field("position").type.to_pandas_dtype())
    labels = np.empty(most, pieces.dtype)
    keys = _keys(plan.state)
    order = np.argsort(keys, kind="stable")
    ends, masked_ends, boundary, tally = _assemble(
        order, plan, corpus, draft.second, special, masking, pairs, pieces, positions, labels
    )
    masked = int(masked_ends[-1]) if len(order) else 0
    random_next = plan.partner[order] >= 0
    batch = example_batch(
        keyed_schema(schema),
        Lists(pieces, ends),
        positions[:masked],
        Lists(labels[:masked], masked_ends),
        boundary,
        random_next,
        corpus.first + plan.row[order],
        keys[order],
    )
    histogram = np.bincount(sizes, minlength=draft.shards.length + 1)
    counts = {
        "pieces": len(pieces),
        "masked": masked,
        "split": tally.tolist(),
        "examples": len(order),
        "random_next": int(random_next.sum()),
        "histogram": histogram.tolist(),
    }
    return Finished(batch, counts)


@compiled
def _keys(states):
    keys = np.empty(states.size, np.uint64)
    for example in range(states.size):
        keys[example] = draw(states[example : example + 1])
    return keys


@compiled
def _assemble(order, plan, corpus, second, special, masking, pairs, pieces, positions, labels):
    """Writes the examples into `pieces`, `positions` and `labels`; returns where each ends, and where B begins."""
    ends, masked_ends = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    boundaries = np.empty(order.size, np.int64)
    tally = np.zeros(3, np.int64)
    candidates = np.empty(masking.predictions.size, np.int64)
    words = np.empty(masking.predictions.size + 1, np.int64)
    at, masked = 0, 0
    for index in range(order.size):
        example = order[index]
        start, size = at, plan.a_end[example] - plan.a_start[example]
        pieces[at] = special.cls
        pieces[at + 1 : at + 1 + size] = corpus.pieces[plan.a_start[example] : plan.a_end[example]]
        pieces[at + 1 + size] = special.sep
        at += size + 2
        boundary = at - start
        if pairs:
            size = plan.b_end[example] - plan.b_start[example]
            pieces[at : at + size] = second[example, :size]
            pieces[at + size] = special.sep
            at += size + 1
        state = plan.state[example : example + 1]
        masked += mask_example(
            state, pieces[start:at], boundary, masking, candidates, words, positions[masked:], labels[masked:], tally
        )
        ends[index], masked_ends[index], boundaries[index] = at, masked, boundary
    return ends, masked_ends, boundaries, tally
