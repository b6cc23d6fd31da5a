"""Step 4, examples: plans them, finds their partners, truncates, masks and sorts them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import write_batches
from data_prep.examples.assembly import Draft, Finished, add_keys, finish_examples
from data_prep.examples.masking import Masking, count_predictions
from data_prep.examples.pairs import fill_second, plan_pairs, plan_sentences, take_partners
from data_prep.examples.parting import Parted, part_sentences
from data_prep.examples.parts import read_parts
from data_prep.examples.sorted_files import SortedFiles
from data_prep.settings import Settings
from data_prep.shards import Counts, ShardSet, example_schema
from data_prep.vocabulary.tokens import Corpus, read_corpus
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
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
class ExamplesTask:
    """Asks a worker for all examples of one length of the documents of one part, for every duplicate."""

    plan: ExamplesPlan
    part: int
    """The number of the part."""
    weight: int
    """How many pieces the documents have."""

    @property
    def name(self) -> str:
        """Identifies the task within its step."""
        return f"{self.part:07}"


def make_examples(task: ExamplesTask) -> ExamplesRecord:
    """Writes a file of examples, with a record batch for every set of shards, or a file for each."""
    folder, files, maker = task.plan.folder, task.plan.files, open_maker(task.plan)
    counts: list[Counts] = []
    finished = maker.make(task.part)
    groups: Iterable[Iterable[Finished]] = ([one] for one in finished) if files.apart else [finished]
    written = [
        write_batches(folder, files.path(task.part, number), maker.schema, _count_and_pass(group, counts))
        for number, group in enumerate(groups)
    ]
    return ExamplesRecord(files=written, counts=counts)


def _count_and_pass(finished: Iterable[Finished], counts: list[Counts]) -> Iterator[pa.RecordBatch]:
    """Yields the record batches for a writer; appends their counts."""
    for examples in finished:
        counts.append(examples.counts)
        yield examples.batch


def list_shard_sets(length: int, duplicates: int, validation: bool) -> list[ShardSet]:
    """Lists the sets of shards of one length, in the order in which a file of examples has them."""
    held_out = [ShardSet(length, 0, validation=True)] if validation else []
    return [ShardSet(length, duplicate) for duplicate in range(duplicates)] + held_out


def make_masking_rules(settings: Settings, length: int, vocabulary: Vocabulary) -> Masking:
    """Makes the masking rules for examples of one length from the settings."""
    masked, random, _ = settings.mask_split
    return Masking(
        count_predictions(length, settings.mask_rate, settings.predictions(length)),
        settings.masking == "whole-word",
        vocabulary.continues,
        vocabulary.special.mask,
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
        self.vocabulary = load_vocabulary(plan.folder / VOCABULARY, self.settings.cased)
        self.rules = make_masking_rules(self.settings, length, self.vocabulary)
        self.schema = add_keys(example_schema(length, len(self.vocabulary), self.parts.num_documents))
        self.sets = list_shard_sets(length, self.settings.duplicates, self.parts.held_out.size > 0)
        self.pairs = self.settings.pairs == "nsp"
        self.room = length - (3 if self.pairs else 2)  # beside [CLS] and a [SEP] for each segment
        self._open: dict[int, Corpus] = {}
        self._open_sentences = 0
        self._neighbours = 0  # the parts that are open are those of these neighbours' partners

    def make(self, part: int) -> Iterator[Finished]:
        """Makes the examples of all sets from one part, a few sets at a time, so that duplicates cost no memory."""
        own = self._read(part)
        for at in range(0, len(self.sets), TOGETHER):
            drafts = [self._draft(part, own.corpus, shards) for shards in self.sets[at : at + TOGETHER]]
            if self.pairs:
                self._add_partners(part, own.corpus, drafts)
            for draft in drafts:
                yield finish_examples(draft, own, self.vocabulary.special, self.rules, self.schema, self.pairs)

    def _read(self, part: int) -> Parted:
        """Reads a part of the corpus, with its sentences parted so that all fit into an example."""
        corpus = read_corpus(self.folder / self.parts.path(part), self.parts.firsts[part])
        return part_sentences(corpus, self.vocabulary.marks, self.room)

    def _draft(self, part: int, corpus: Corpus, shards: ShardSet) -> Draft:
        """Plans the examples of one set of shards; what their segments B hold is filled in later."""
        settings, held_out = self.settings, self.parts.validation_rows(part)
        rows = held_out if shards.validation else np.delete(np.arange(corpus.document_ends.size), held_out)
        key = (shards.length, shards.duplicate, settings.seed, settings.short_probability)
        if self.pairs:
            segments = plan_pairs(corpus, rows, self.parts.pool(part, settings.seed, shards.validation), *key)
        else:
            segments = plan_sentences(corpus, rows, *key)
        second = np.empty((len(segments.row), self.room if self.pairs else 0), corpus.pieces.dtype)
        return Draft(shards, rows, segments, second)

    def _add_partners(self, own_part: int, own: Corpus, drafts: list[Draft]) -> None:
        """Fills in segment B of all examples: those from this part, then part by part those from elsewhere."""
        homes = []
        for draft in drafts:
            fill_second(np.flatnonzero(draft.segments.partner < 0), draft.segments, own, draft.second)
            home = self.parts.find(draft.segments.partner)
            order = np.argsort(home, kind="stable")
            bounds = np.searchsorted(home[order], np.arange(len(self.parts.paths) + 1))
            homes.append((draft, order, bounds.tolist()))
        self._close_others(self.parts.neighbours(own_part))
        for part in range(len(self.parts.paths)):
            wanted = [(draft, order[bounds[part] : bounds[part + 1]]) for draft, order, bounds in homes]
            if not any(len(chosen) for _, chosen in wanted):
                continue
            corpus = own if part == own_part else self._read_or_find(part)
            for draft, chosen in wanted:
                if len(chosen):
                    take_partners(chosen, draft.segments, corpus, draft.second)

    def _read_or_find(self, part: int) -> Corpus:
        """Reads another part of the corpus, and keeps it open if there is room; or finds it open."""
        if part in self._open:
            return self._open[part]
        corpus = self._read(part).corpus
        if self._open_sentences + corpus.sentence_ends.size <= MOST_SENTENCES:
            self._open[part] = corpus
            self._open_sentences += corpus.sentence_ends.size
        return corpus

    def _close_others(self, neighbours: int) -> None:
        """Closes the parts that are open for other neighbours, which have their partners elsewhere."""
        if neighbours != self._neighbours:
            self._open, self._open_sentences, self._neighbours = {}, 0, neighbours


@functools.lru_cache(maxsize=1)
def open_maker(plan: ExamplesPlan) -> ExampleMaker:
    """Returns the maker of a plan's examples, which is kept for the next tasks of this process."""
    return ExampleMaker(plan)
