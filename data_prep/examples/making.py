"""Step 4, examples: plans them, finds their partners, truncates, masks and sorts them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import write_batches
from data_prep.examples.assembly import Draft, Finished, finish, keyed_schema
from data_prep.examples.masking import Masking, num_predictions
from data_prep.examples.pairs import fill, plan_pairs, plan_sentences, take_partners
from data_prep.examples.parting import Parted, part_sentences
from data_prep.examples.parts import Parts, read_parts
from data_prep.examples.sorted_files import SortedFiles
from data_prep.settings import Settings
from data_prep.shards import Counts, ShardSet, example_schema
from data_prep.vocabulary.tokens import Corpus, read_corpus
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary
from data_prep.work import ExamplesRecord

MOST_SENTENCES = 1 << 24  # of the parts that a worker keeps open: where each ends is 4 bytes
TOGETHER = 6  # sets of shards made at a time: one sweep over the partners, and memory for so many


@dataclass(frozen=True)
class ExamplesTask:
    """Asks a worker for all examples of one length of the documents of one part, for every duplicate."""

    folder: Path
    """The output folder."""
    part: int
    """The number of the part."""
    files: SortedFiles
    """The files that the examples are written to."""
    corpus_key: str
    """Stands for the parts, the documents held out and the vocabulary."""
    settings: Settings
    weight: int
    """How many pieces the documents have."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""
        return f"{self.part:07}"

    @property
    def length(self) -> int:
        """Says how many pieces an example has at most."""
        return self.files.length


def make_examples(task: ExamplesTask) -> ExamplesRecord:
    """Writes a file of examples, with a record batch for every set of shards, or a file for each."""
    settings, parts = task.settings, read_parts(task.folder, task.corpus_key)
    vocabulary = _vocabulary(task.folder / VOCABULARY, settings.cased, task.corpus_key)
    counts: list[Counts] = []
    schema = keyed_schema(example_schema(task.length, len(vocabulary), parts.num_documents))
    finished = _finish_sets(task, parts, vocabulary, schema)
    groups: Iterable[Iterable[Finished]] = ([one] for one in finished) if task.files.apart else [finished]
    files = [
        write_batches(task.folder, task.files.path(task.part, number), schema, _noting(group, counts))
        for number, group in enumerate(groups)
    ]
    return ExamplesRecord(files=files, counts=counts)


def shard_sets(length: int, duplicates: int, validation: bool) -> list[ShardSet]:
    """Lists the sets of shards of one length, in the order in which a file of examples has them."""
    held_out = [ShardSet(length, 0, validation=True)] if validation else []
    return [ShardSet(length, duplicate) for duplicate in range(duplicates)] + held_out


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
def _vocabulary(path: Path, cased: bool, corpus_key: str) -> Vocabulary:  # noqa: ARG001 - tells a vocabulary from others
    """Loads the vocabulary once for all tasks of a worker."""
    return load_vocabulary(path, cased)


def _finish_sets(task: ExamplesTask, parts: Parts, vocabulary: Vocabulary, schema: pa.Schema) -> Iterator[Finished]:
    """Makes the examples of all sets of the length, a few at a time, so that duplicates cost no memory."""
    settings = task.settings
    pairs, rules = settings.pairs == "nsp", masking_rules(settings, task.length, vocabulary)
    sets = shard_sets(task.length, settings.duplicates, parts.held_out.size > 0)
    own = _read(task.part, parts, task, vocabulary)
    for at in range(0, len(sets), TOGETHER):
        drafts = [_draft(shards, own.corpus, parts, task) for shards in sets[at : at + TOGETHER]]
        if pairs:
            _add_partners(drafts, own.corpus, parts, task, vocabulary)
        for draft in drafts:
            yield finish(draft, own, vocabulary.special, rules, schema, pairs)


def _read(part: int, parts: Parts, task: ExamplesTask, vocabulary: Vocabulary) -> Parted:
    """Reads a part of the corpus, with its sentences parted so that all fit into an example."""
    corpus = read_corpus(task.folder / parts.path(part), parts.firsts[part])
    return part_sentences(corpus, vocabulary.marks, room(task.length, task.settings))


@dataclass
class OpenParts:
    """Parts that stay open for the examples of others, as many as memory allows.

    All parts go through them in the same order. So those that came first stay: those that came last would be gone
    whenever they are needed again.
    """

    corpora: dict[int, Corpus] = field(default_factory=dict)
    sentences: int = 0

    def keep(self, part: int, corpus: Corpus) -> None:
        """Keeps a part, if there is room."""
        if self.sentences + corpus.sentence_ends.size <= MOST_SENTENCES:
            self.corpora[part] = corpus
            self.sentences += corpus.sentence_ends.size


@functools.lru_cache(maxsize=1)
def _open_parts(folder: Path, corpus_key: str, length: int, neighbours: int) -> OpenParts:  # noqa: ARG001 - keys
    """The parts that a worker has open for examples of this length, of parts that have their partners in the same."""
    return OpenParts()


def close_parts() -> None:
    """Closes what this process has open of a corpus, whose folder is about to go."""
    _open_parts.cache_clear()
    read_parts.cache_clear()


def _partners_in(part: int, kept: OpenParts, parts: Parts, task: ExamplesTask, vocabulary: Vocabulary) -> Corpus:
    """Reads another part of the corpus, or finds it open."""
    if part in kept.corpora:
        return kept.corpora[part]
    corpus = _read(part, parts, task, vocabulary).corpus
    kept.keep(part, corpus)
    return corpus


def room(length: int, settings: Settings) -> int:
    """Counts the pieces of text that an example has room for, beside [CLS] and a [SEP] for each segment."""
    return length - (3 if settings.pairs == "nsp" else 2)


def _noting(finished: Iterable[Finished], counts: list[Counts]) -> Iterator[pa.RecordBatch]:
    """Passes on the record batches alone, for a writer that takes them as they come; notes what they count."""
    for examples in finished:
        counts.append(examples.counts)
        yield examples.batch


def _draft(shards: ShardSet, corpus: Corpus, parts: Parts, task: ExamplesTask) -> Draft:
    """Plans the examples of one set of shards; what their segments B hold is filled in later."""
    settings = task.settings
    held_out = parts.validation_rows(task.part)
    rows = held_out if shards.validation else np.delete(np.arange(corpus.document_ends.size), held_out)
    key = (shards.length, shards.duplicate, settings.seed, settings.short_probability)
    if settings.pairs == "nsp":
        pool = parts.pool(task.part, settings.seed, shards.validation)
        segments, room_b = plan_pairs(corpus, rows, pool, *key), room(shards.length, settings)
    else:
        segments, room_b = plan_sentences(corpus, rows, *key), 0
    return Draft(shards, rows, segments, np.empty((len(segments.row), room_b), corpus.pieces.dtype))


def _add_partners(drafts: list[Draft], own: Corpus, parts: Parts, task: ExamplesTask, vocabulary: Vocabulary) -> None:
    """Fills in segment B of all examples: those from this part, then part by part those from elsewhere."""
    homes = []
    for draft in drafts:
        fill(np.flatnonzero(draft.segments.partner < 0), draft.segments, own, draft.second)
        home = parts.find(draft.segments.partner)
        order = np.argsort(home, kind="stable")
        bounds = np.searchsorted(home[order], np.arange(len(parts.paths) + 1))
        homes.append((draft, order, bounds.tolist()))
    opened = _open_parts(task.folder, task.corpus_key, task.length, parts.neighbours(task.part))
    for part in range(len(parts.paths)):
        wanted = [(draft, order[bounds[part] : bounds[part + 1]]) for draft, order, bounds in homes]
        if not any(len(chosen) for _, chosen in wanted):
            continue
        corpus = own if part == task.part else _partners_in(part, opened, parts, task, vocabulary)
        for draft, chosen in wanted:
            if len(chosen):
                take_partners(chosen, draft.segments, corpus, draft.second)
