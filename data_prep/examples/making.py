"""Step 4, examples: plans them, finds their partners, truncates, masks and sorts them by random keys.

The keys make the global shuffle: every example has one from its own stream of random numbers, the examples of a file
are stored in its order, and a shard is all the examples of the corpus in one range of keys, sorted (merging.py). So
shards come out uniformly shuffled over the whole corpus, and the corpus is never in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import Lists, make_example_batch, write_batches
from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.examples.masking import Masking, count_predictions, mask_example
from data_prep.examples.merging import SortedFiles, add_keys
from data_prep.examples.pairs import Segments, fill_second, join_documents, place_partners, plan_joined, plan_segments
from data_prep.examples.parting import Parted, count_use, part_sentences
from data_prep.examples.parts import read_parts
from data_prep.examples.streams import draw_bits
from data_prep.running import NumberedTask
from data_prep.settings import MASK_SPLIT, Settings
from data_prep.shards import Counts, ShardSet, example_schema
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.tokens import Corpus, read_corpus
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import ExamplesRecord

MOST_SENTENCES = 1 << 24  # of the parts that a worker keeps open: where each ends is 4 bytes
TOGETHER = 6  # sets of shards made in one sweep over the partners, all in memory


@dataclass(frozen=True)
class ExamplesPlan:
    """The inputs and settings of the examples of one length, the same for all parts."""

    folder: Path
    """The output folder."""
    corpus_key: str
    """Hash of the parts, the documents held out and the vocabulary."""
    files: SortedFiles
    """The files that the examples are written to."""
    settings: Settings


@dataclass(frozen=True)
class ExamplesTask(NumberedTask):
    """Asks a worker for all examples of one length of the documents of one part, for every duplicate."""

    plan: ExamplesPlan


class Draft(NamedTuple):
    """The examples of one set of shards, from one file of documents, when their segments are known."""

    shards: ShardSet
    rows: Array  # the documents that they are made of
    corpus: Corpus  # whose pieces segments A are ranges of
    segments: Segments
    second: Array  # (examples, room) the pieces of segment B


def make_examples(task: ExamplesTask) -> ExamplesRecord:
    """Writes a file of examples, with a record batch for every set of shards, or a file for each."""
    files, maker = task.plan.files, open_maker(task.plan)
    made, counts = maker.make(task.number), list[Counts]()

    def take(number: int) -> Iterator[pa.RecordBatch]:
        for batch, counted in islice(made, number):
            counts.append(counted)
            yield batch

    each = 1 if files.apart else len(maker.sets)
    paths = files.paths(task.number, len(maker.sets))
    written = [write_batches(task.folder, path, maker.schema, take(each)) for path in paths]
    return ExamplesRecord(files=written, counts=counts)


def list_shard_sets(length: int, duplicates: int, validation: bool) -> list[ShardSet]:
    """Lists the sets of shards of one length, in the order in which a file of examples has them."""
    held_out = [ShardSet(length, 0, validation=True)] if validation else []
    return [ShardSet(length, duplicate) for duplicate in range(duplicates)] + held_out


def make_masking_rules(settings: Settings, length: int, vocabulary: Vocabulary) -> Masking:
    """Makes the masking rules for examples of one length from the settings."""
    masked, random, _ = MASK_SPLIT
    return Masking(
        count_predictions(length, settings.mask_rate, settings.predictions(length)),
        settings.masking == "whole-word",
        vocabulary.continues,
        vocabulary.special.mask,
        vocabulary.special.sep,
        masked / 100,
        random / 100,
    )


class ExampleMaker:
    """Makes the examples of one length, for one part of the corpus after another.

    The parts of partners stay open, as many as memory allows. All parts go through them in the same order. So those
    that came first stay: those that came last would be gone whenever they are needed again.
    """

    def __init__(self, plan: ExamplesPlan) -> None:
        self.folder, self.settings, length = plan.folder, plan.settings, plan.files.length
        self.parts = read_parts(plan.folder)
        self.vocabulary = load_vocabulary(plan.folder, self.settings.cased)
        self.rules = make_masking_rules(self.settings, length, self.vocabulary)
        self.schema = add_keys(example_schema(length, len(self.vocabulary), self.parts.num_documents))
        self.sets = list_shard_sets(length, self.settings.duplicates, self.parts.held_out.size > 0)
        self.pairs = self.settings.pairs == "nsp"
        self.room = length - (3 if self.pairs else 2)  # beside [CLS] and a [SEP] for each segment
        self._open: dict[int, Corpus] = {}
        self._open_sentences = 0
        self._neighbours = 0  # the parts that are open are those of these neighbours' partners

    def make(self, part: int) -> Iterator[tuple[pa.RecordBatch, Counts]]:
        """Makes the examples of all sets from one part, a few sets at a time, so that duplicates cost no memory."""
        own, held_out = self._read(part), self.parts.validation_rows(part)
        rows = np.delete(np.arange(own.corpus.document_ends.size), held_out), held_out  # for training, for validation
        joined = self.settings.pairs == "full-sentences"
        separator = self.vocabulary.special.sep
        texts = [join_documents(own.corpus, chosen, separator) if joined else None for chosen in rows]
        for at in range(0, len(self.sets), TOGETHER):
            drafts = [
                self._plan_draft(part, own.corpus, one, rows[one.validation], texts[one.validation])
                for one in self.sets[at : at + TOGETHER]
            ]
            if self.pairs:
                self._add_partners(part, own.corpus, drafts)
            for draft in drafts:
                yield self._finish(draft, own)

    def _read(self, part: int) -> Parted:
        """Reads a part of the corpus, with its sentences parted so that all fit into an example."""
        corpus = read_corpus(self.folder / self.parts.path(part), self.parts.firsts[part])
        return part_sentences(corpus, self.vocabulary.marks, self.room)

    def _plan_draft(self, part: int, corpus: Corpus, shards: ShardSet, rows: Array, joined: Corpus | None) -> Draft:
        """Plans the examples of one set of shards; what their segments B hold is filled in later."""
        pool = self.parts.pool(part, self.settings.seed, shards.validation) if self.pairs else None
        key = (shards.length, shards.duplicate, self.settings.seed, self.settings.short_probability)
        planned = plan_joined(corpus, rows, joined, *key) if joined else plan_segments(corpus, rows, pool, *key)
        second = np.empty((len(planned.row), self.room if self.pairs else 0), corpus.pieces.dtype)
        return Draft(shards, rows, joined or corpus, planned, second)

    def _add_partners(self, own_part: int, own: Corpus, drafts: list[Draft]) -> None:
        """Fills in segment B of all examples: those from this part, then part by part those from elsewhere."""
        if self._neighbours != (neighbours := self.parts.neighbours(own_part)):  # which have their partners elsewhere
            self._open, self._open_sentences, self._neighbours = {}, 0, neighbours
        homes = [self.parts.find(draft.segments.partner) for draft in drafts]  # -1 where B is the true next
        for part in np.unique(np.concatenate(homes)).tolist():
            corpus = own if part in (-1, own_part) else self._open_part(part)
            for draft, home in zip(drafts, homes, strict=True):
                chosen = np.flatnonzero(home == part)
                if part >= 0:
                    place_partners(chosen, draft.segments, corpus)
                fill_second(chosen, draft.segments, corpus, draft.second)

    def _open_part(self, part: int) -> Corpus:
        """Reads another part of the corpus, and keeps it open if there is room; or finds it open."""
        if part in self._open:
            return self._open[part]
        corpus = self._read(part).corpus
        if self._open_sentences + corpus.sentence_ends.size <= MOST_SENTENCES:
            self._open[part] = corpus
            self._open_sentences += corpus.sentence_ends.size
        return corpus

    def _finish(self, draft: Draft, own: Parted) -> tuple[pa.RecordBatch, Counts]:
        """Puts the segments of examples together, masks them, and sorts the examples by their keys."""
        segments, corpus = draft.segments, draft.corpus
        num_specials = 3 if self.pairs else 2
        sizes = (segments.a_end - segments.a_start) + (segments.b_end - segments.b_start) + num_specials
        position = self.schema.field("masked").type.value_type.field("position").type.to_pandas_dtype()
        pieces = np.empty(sizes.sum(), self.schema.field("pieces").type.value_type.to_pandas_dtype())
        most = int(self.rules.predictions[sizes].sum())
        positions = np.empty(most, np.uint16)  # of one type, so that the loop is compiled once for all lengths
        labels = np.empty(most, pieces.dtype)
        keys = _draw_keys(segments.state)
        order = np.argsort(keys, kind="stable")
        rules, special = self.rules, self.vocabulary.special
        ends, masked_ends, boundary, split = _assemble_examples(
            order, segments, corpus, draft.second, special, rules, self.pairs, pieces, positions, labels
        )
        masked = int(masked_ends[-1]) if len(order) else 0
        random_next = segments.partner[order] >= 0
        lists = Lists(pieces, ends), positions[:masked].astype(position), Lists(labels[:masked], masked_ends)
        columns = boundary, random_next, corpus.first + segments.row[order], keys[order]
        counts = Counts(
            examples=len(order),
            pieces=len(pieces),
            masked=masked,
            split=split.tolist(),
            random_next=int(random_next.sum()),
            histogram=np.bincount(sizes, minlength=draft.shards.length + 1).tolist(),
            **count_use(segments if self.pairs else None, draft.rows, own),
        )
        return make_example_batch(self.schema, *lists, *columns), counts


open_maker = functools.lru_cache(maxsize=1)(ExampleMaker)
"""Returns the maker of a plan's examples, which is kept for the next tasks of this process."""


@compiled
def _draw_keys(states):
    """Draws the keys of all examples from their streams of random numbers."""
    keys = np.empty(states.size, np.uint64)
    for example in range(states.size):
        keys[example] = draw_bits(states[example : example + 1])
    return keys


@compiled
def _assemble_examples(order, segments, corpus, second, special, masking, pairs, pieces, positions, labels):
    """Writes the examples into `pieces`, `positions` and `labels`.

    Returns where the pieces and the labels of every example end, where its segment B begins, and how many pieces were
    masked, replaced and kept.
    """
    ends, masked_ends = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    boundaries = np.empty(order.size, np.int64)
    split = np.zeros(3, np.int64)
    candidates = np.empty(masking.predictions.size, np.int64)
    words = np.empty(masking.predictions.size + 1, np.int64)
    at, masked = 0, 0
    for index in range(order.size):
        example = order[index]
        start, size = at, segments.a_end[example] - segments.a_start[example]
        pieces[at] = special.cls
        copy_items(pieces, at + 1, corpus.pieces, segments.a_start[example], segments.a_end[example])
        pieces[at + 1 + size] = special.sep
        at += size + 2
        boundary = at - start
        if pairs:
            size = segments.b_end[example] - segments.b_start[example]
            copy_items(pieces, at, second[example], 0, size)
            pieces[at + size] = special.sep
            at += size + 1
        state = segments.state[example : example + 1]
        masked += mask_example(
            state, pieces[start:at], boundary, masking, candidates, words, positions[masked:], labels[masked:], split
        )
        ends[index], masked_ends[index], boundaries[index] = at, masked, boundary
    return ends, masked_ends, boundaries, split
