"""Step 4, examples: plans them, finds their partners, truncates, masks and sorts them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.examples.assembly import Draft, Finished, finish, keyed_schema
from data_prep.examples.masking import Masking, num_predictions
from data_prep.examples.pairs import copy_second, place_partners, plan_pairs, plan_sentences, truncate
from data_prep.examples.validation import Members, read_members
from data_prep.settings import Settings
from data_prep.shards import ShardSet, example_schema, write_batches
from data_prep.vocabulary.tokens import Corpus, read_corpus
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
from data_prep.work import examples_path

TOGETHER = 6  # sets of shards made at a time: one sweep over the partners, and memory for so many


@dataclass(frozen=True)
class Parts:
    """All files of token documents, in the order of the corpus: partners may be in any of them."""

    paths: tuple[str, ...]
    firsts: tuple[int, ...]
    """The numbers of the documents with which the files begin."""
    num_documents: int
    held_out_sha256: str
    vocabulary_sha256: str


@dataclass(frozen=True)
class ExamplesTask:
    """Asks a worker for all examples of the documents of one file, for every length and duplicate."""

    folder: Path
    """The output folder."""
    part: int
    """The number of the file among the parts."""
    parts: Parts
    settings: Settings
    weight: int
    """How many pieces the documents have."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""
        return f"{self.part:06}"


def make_examples(task: ExamplesTask) -> dict[str, Any]:
    """Writes a file of examples for every length, with a record batch for every set of shards."""
    settings, parts = task.settings, task.parts
    corpus = read_corpus(task.folder / parts.paths[task.part], parts.firsts[task.part])
    vocabulary = _vocabulary(task.folder / VOCABULARY, settings.cased, parts.vocabulary_sha256)
    members = read_members(task.folder, parts.num_documents, parts.held_out_sha256)
    files: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    for length in settings.lengths:
        schema = example_schema(length, len(vocabulary), parts.num_documents)
        finished = _finish_sets(task, length, corpus, members, vocabulary, schema)
        name = examples_path(task.name, length)
        files.append(write_batches(task.folder, name, keyed_schema(schema), _noting(finished, counts)).as_json())
    return {"files": files, "counts": counts}


def shard_sets(length: int, duplicates: int, validation: bool) -> list[ShardSet]:
    """Lists the sets of shards of one length, in the order in which a file of examples has them."""
    held_out = [ShardSet(length, 0, validation=True)] if validation else []
    return [ShardSet(length, duplicate) for duplicate in range(duplicates)] + held_out


def all_sets(settings: Settings, validation: bool) -> list[ShardSet]:
    """Lists every set of shards that these settings make."""
    return [shards for length in settings.lengths for shards in shard_sets(length, settings.duplicates, validation)]


def masking_rules(settings: Settings, length: int, vocabulary: Vocabulary) -> Masking:
    """Works out what the settings mean for the masks of examples of one length."""
    masked, random, _ = settings.mask_split
    return Masking(
        num_predictions(length, settings.mask_rate, settings.predictions(length)),
        settings.masking == "whole-word",
        vocabulary.continues,
        vocabulary.special.mask,
        masked / 100,
        random / 100,
    )


@functools.lru_cache(maxsize=1)
def _vocabulary(path: Path, cased: bool, sha256: str) -> Vocabulary:
    """Loads the vocabulary once for all tasks of a worker."""
    vocabulary = load_vocabulary(path, cased)
    assert vocabulary.sha256 == sha256
    return vocabulary


def _finish_sets(
    task: ExamplesTask, length: int, corpus: Corpus, members: Members, vocabulary: Vocabulary, schema: pa.Schema
) -> Iterator[Finished]:
    """Makes the examples of all sets of one length, a few at a time, so that duplicates cost no memory."""
    settings = task.settings
    pairs, rules = settings.pairs == "nsp", masking_rules(settings, length, vocabulary)
    sets = shard_sets(length, settings.duplicates, members.validation.size > 0)
    for at in range(0, len(sets), TOGETHER):
        drafts = [_draft(shards, corpus, members, settings) for shards in sets[at : at + TOGETHER]]
        if pairs:
            _add_partners(drafts, corpus, task)
        for draft in drafts:
            yield finish(draft, corpus, vocabulary.special, rules, schema, pairs)


def _noting(finished: Iterable[Finished], counts: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    """Passes on the record batches alone, for a writer that takes them as they come; notes what they count."""
    for examples in finished:
        counts.append(examples.counts)
        yield examples.batch


def _draft(shards: ShardSet, corpus: Corpus, members: Members, settings: Settings) -> Draft:
    """Plans the examples of one set of shards; what their segments B hold is filled in later."""
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
    """Truncates the chosen examples, whose segments B lie in this corpus, and copies those segments."""
    truncate(chosen, draft.plan, draft.second.shape[1])
    copy_second(chosen, draft.plan, corpus, draft.second)
