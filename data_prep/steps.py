"""The steps from text to shards, which a run, the sample of a forecast and a rehearsal go through alike.

documents  every file becomes Arrow files of documents and their sentences          readers/extraction.py
words      are counted where a vocabulary is trained or extended                    vocabulary/
tokens     sentences become pieces                                                  vocabulary/tokens.py
(chosen)   copies and what is over a share are left out, some documents held out    examples/sifting.py, validation.py
examples   pairs, truncation, masks, for every duplicate of a length                examples/making.py
(merged)   sorted examples of many parts come into fewer files                      examples/merging.py
shards     the global shuffle; then the next length                                 examples/merging.py

Nothing here depends on who ran which task, or when: results are taken in the order of tasks.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import map_batches, write_batches
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, replacing
from data_prep.common.languages import DEFAULT
from data_prep.common.progress import StepProgress
from data_prep.examples import merging, sifting
from data_prep.examples.making import ExamplesTask, make_examples, shard_sets
from data_prep.examples.merging import ShardTask, SortedFiles
from data_prep.examples.parts import HELD_OUT, PARTS, read_parts, write_parts
from data_prep.examples.sifting import SiftTask
from data_prep.examples.validation import choose_held_out
from data_prep.readers.extraction import ExtractTask, extract
from data_prep.readers.sources import Bundle
from data_prep.running import Runner, Step
from data_prep.settings import Settings
from data_prep.shards import DOCUMENTS, DOCUMENTS_SCHEMA, Counts, SetFigures, example_schema
from data_prep.vocabulary.extension import extend_vocabulary
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary, train_vocabulary
from data_prep.work import DocumentsRecord, ExamplesRecord, Record, Records, TokensRecord

READ = Step("documents", extract, DocumentsRecord, "B", items=lambda record: record.documents)
COUNT = Step("words", count_part, Record, "B")
ENCODE = Step("tokens", encode_part, TokensRecord, "B", items=lambda record: record.documents)
LEAVE_OUT_COPIES = Step("unique", sifting.leave_out_copies, TokensRecord, "pieces", after=sifting.delete_replaced)
LEAVE_OUT_SHARE = Step("limited", sifting.leave_out_share, TokensRecord, "pieces", after=sifting.delete_replaced)
CUT_PASSAGES = Step("passages", sifting.cut_passages, TokensRecord, "pieces")
MAKE_EXAMPLES = Step("examples", make_examples, ExamplesRecord, "pieces")
MERGE = Step("merged", merging.merge, Record, "B", after=merging.delete_merged)
WRITE_SHARDS = Step("shards", merging.write_shard, Record, "pieces")

TRAINED, MARKED, SPLIT = "vocabulary", "marked", "split"
"""What is done at once: the vocabulary is there, the copies are found, the documents are numbered and divided."""
VOCABULARY_PARTS = 64  # files of documents that a vocabulary is trained from, spread over the corpus
KEY_BYTES = 8  # of the key by which an example is shuffled, until it is in a shard
Rounds: TypeAlias = Iterable[tuple[SortedFiles, int, SortedFiles]]


@dataclass(frozen=True)
class Made:
    """What a run has made of its documents."""

    tables: list[FileRecord]
    """The files that are no shards."""
    chosen: Records[TokensRecord]
    """What is in the files of token documents that examples are made of."""
    num_held_out: int
    figures: list[SetFigures]


@dataclass(frozen=True)
class Steps:
    """Goes through the steps with the settings of a run."""

    runner: Runner
    settings: Settings
    rounds: Callable[[SortedFiles, int, int], Rounds] = merging.merging_rounds
    """Says how files of examples are merged."""

    @property
    def folder(self) -> Path:
        """Names the output folder."""
        return self.runner.work.out

    def extract_task(self, bundle: Bundle) -> ExtractTask:
        """Makes the task that reads a bundle."""
        s = self.settings
        language = s.language_of(bundle.source) or DEFAULT
        return ExtractTask(self.folder, bundle, language, s.text_field_of(bundle.source), s.errors, s.formulas)

    def read(self, bundles: list[Bundle]) -> Records[DocumentsRecord]:
        """Reads all files into documents."""
        return self.runner.run(READ, lambda: map(self.extract_task, bundles))

    def count(self, tasks: list[PartTask]) -> Iterator[Path]:
        """Counts the words of files of documents; returns the files of the counts."""
        records = self.runner.run(COUNT, lambda: tasks)
        return (self.folder / record.path for record in records)

    def make_vocabulary(self, documents: Iterable[DocumentsRecord], given: Vocabulary | None) -> Vocabulary:
        """Trains a vocabulary on files of documents from all over the corpus, or adds their words to a given one."""
        s, work, console = self.settings, self.runner.work, self.runner.console
        if given and not s.extend:
            return given
        stride = -(-sum(len(record.files) for record in documents) // VOCABULARY_PARTS)
        tasks = list(islice(self.part_tasks(documents), 0, None, max(stride, 1)))
        key = hash_of(*(task.name for task in tasks))
        if not work.is_finished(TRAINED, key):
            paths = self.count(tasks)
            with StepProgress(console, TRAINED, "", 1, 0).shown():
                os.environ["TOKENIZERS_PARALLELISM"] = "true"
                counts = add_up(paths)
                extension = extend_vocabulary(given, counts, s.extend) if given else None
                made = extension.vocabulary if extension else train_vocabulary(counts, s.vocab_size, s.cased)
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
            if extension:
                console.print(str(extension), markup=False, soft_wrap=True)
            work.reopen(TRAINED)
            made.write(self.folder)
            work.finish(TRAINED, key)
        return load_vocabulary(self.folder / VOCABULARY, s.cased)

    def part_tasks(self, documents: Iterable[DocumentsRecord], vocabulary_sha256: str = "") -> Iterator[PartTask]:
        """Makes a task of every file of documents."""
        for record in documents:
            for file in record.files:
                yield PartTask(self.folder, file.path, file.text_bytes, self.settings.cased, vocabulary_sha256)

    def make_shards(self, documents: Iterable[DocumentsRecord], vocabulary: Vocabulary) -> Made:
        """Cuts documents into pieces, chooses among them, and makes shards of every length."""
        tables, work = vocabulary.write(self.folder), self.runner.work
        tokens = self.runner.run(ENCODE, lambda: self.part_tasks(documents, vocabulary.sha256))
        work.forget(READ.name, COUNT.name)
        chosen = self._choose(tokens, documents, vocabulary.special.unk)
        tables.append(self._write_documents(documents, chosen))
        if not work.is_finished(SPLIT):
            self._split(chosen)
            work.finish(SPLIT)
        checksums = [FileRecord.of(self.folder, name).sha256 for name in (PARTS, HELD_OUT)]
        key = hash_of(*checksums, vocabulary.sha256)
        lengths = [self._make_length(length, key, len(vocabulary)) for length in self.settings.lengths]
        num_held_out = len(np.load(self.folder / HELD_OUT, mmap_mode="r"))
        return Made(tables, chosen, num_held_out, [figures for one in lengths for figures in one])

    def _choose(
        self, tokens: Records[TokensRecord], documents: Iterable[DocumentsRecord], unknown: int
    ) -> Records[TokensRecord]:
        """Leaves out what the user wants left out, and cuts passages for validation where documents are few."""
        s, work = self.settings, self.runner.work

        def sifted(
            step: Step[SiftTask, TokensRecord], more: Callable[[], Iterable[dict[str, Any]]] = lambda: repeat({})
        ) -> Records[TokensRecord]:
            """Runs a step on all files of token documents; `more` says what its tasks need besides."""

            def tasks() -> Iterator[SiftTask]:
                first = 0
                for number, (record, extra) in enumerate(zip(tokens, more(), strict=False)):
                    own = {"first": first, "seed": s.seed, **extra}
                    yield SiftTask(self.folder, step.name, number, record, unknown, **own)
                    first += record.documents

            return self.runner.run(step, tasks)

        num_documents = sum(record.documents for record in tokens)
        if not num_documents:
            raise UserError("no document has any text in it once it is cut into pieces")
        if s.drop_copies:
            if not work.is_finished(MARKED):
                sifting.mark_copies(self.folder, lambda: self._digests(tokens), num_documents)
                work.finish(MARKED)
            tokens = sifted(LEAVE_OUT_COPIES)
        if s.max_shares:
            pieces: Counter[str] = Counter()
            for source, record in zip(sources_of_parts(documents), tokens, strict=True):
                pieces[source] += record.pieces
            shares = sifting.kept_shares(pieces, s.max_shares)
            tokens = sifted(
                LEAVE_OUT_SHARE, lambda: ({"kept_share": shares[source]} for source in sources_of_parts(documents))
            )
        num_documents = sum(record.documents for record in tokens)
        num_sentences = sum(record.sentences for record in tokens)
        passages = sifting.choose_passages(num_documents, num_sentences, s.validation, s.seed)
        if not passages:
            return tokens
        copied = sifting.texts_with_copies(self._digests(tokens))
        return sifted(CUT_PASSAGES, lambda: sifting.passages_of(tokens, passages, copied))

    def _digests(self, tokens: Iterable[TokensRecord]) -> Iterator[Array]:
        """Goes through the digests of all documents, file by file."""
        for record in tokens:
            if record.documents:  # a copy, so that the file is not mapped on
                yield np.array(map_batches(self.folder / record.path).get_batch(0)["digest"])

    def _write_documents(self, documents: Iterable[DocumentsRecord], chosen: Iterable[TokensRecord]) -> FileRecord:
        """Writes the table of all documents, in which the number of a document is its row."""

        def batches() -> Iterator[pa.RecordBatch]:
            for source, record in zip(sources_of_parts(documents), chosen, strict=True):
                batch = map_batches(self.folder / record.path).get_batch(0)
                names = pa.array([source] * batch.num_rows, pa.string())
                yield pa.record_batch([batch["id"], batch["title"], names], schema=DOCUMENTS_SCHEMA)

        return write_batches(self.folder, DOCUMENTS, DOCUMENTS_SCHEMA, batches(), compression="zstd")

    def _split(self, tokens: Records[TokensRecord]) -> None:
        """Numbers the documents and chooses those held out: the passages that were cut, where there are such."""
        s, filled = self.settings, (record for record in tokens if record.documents)
        write_parts(self.folder, ((record.path, record.documents, record.pieces) for record in filled))
        firsts = itertools.accumulate((record.documents for record in tokens), initial=0)
        if any(record.books is not None for record in tokens):
            rows = (first + np.array(record.held_out, np.int64) for first, record in zip(firsts, tokens, strict=False))
            held_out = np.unique(np.concatenate([*rows]))
        else:
            num_documents = sum(record.documents for record in tokens)
            held_out = choose_held_out(lambda: self._digests(tokens), num_documents, s.validation, s.seed)
        with replacing(self.folder / HELD_OUT) as file:
            np.save(file, held_out)

    def _make_length(self, length: int, corpus_key: str, vocabulary_size: int) -> list[SetFigures]:
        """Makes the shards of a length, and deletes all that was needed for them alone."""
        s, parts = self.settings, read_parts(self.folder, corpus_key)
        sets = shard_sets(length, s.duplicates, parts.held_out.size > 0)
        files = SortedFiles(length, len(parts.paths))

        def example_tasks() -> Iterator[ExamplesTask]:
            for part, pieces in enumerate(parts.pieces.tolist()):
                yield ExamplesTask(self.folder, part, length, corpus_key, s, pieces)

        examples = self.runner.run(MAKE_EXAMPLES.called(files.step), example_tasks)
        totals = add_counts(record.counts for record in examples)
        schema = example_schema(length, vocabulary_size, parts.num_documents)
        sizes = [estimated_bytes(total, schema) for total in totals]
        keyed = sum(sizes) + KEY_BYTES * sum(total.examples for total in totals)
        files = self._merge(files, keyed, len(sets))
        shards = [max(1, round(size / s.shard_bytes)) for size in sizes]

        def shard_tasks() -> Iterator[ShardTask]:
            for number, (one, total, count) in enumerate(zip(sets, totals, shards, strict=True)):
                for index in range(count):
                    yield ShardTask(self.folder, one, index, count, number, files, total.pieces // count)

        written = iter(self.runner.run(WRITE_SHARDS.called(f"{WRITE_SHARDS.name}-{length}"), shard_tasks))
        self.runner.work.forget(files.step)
        return [
            SetFigures(
                **asdict(one),
                **total.as_json(),
                shards=[file for record in islice(written, count) for file in record.files],
            )
            for one, total, count in zip(sets, totals, shards, strict=True)
        ]

    def _merge(self, files: SortedFiles, total_bytes: int, num_sets: int) -> SortedFiles:
        """Merges files of examples in as many rounds as it takes, and deletes each as soon as it is merged."""
        for source, fan_in, target in self.rounds(files, total_bytes, num_sets):
            tasks = partial(merging.merge_tasks, self.folder, source, fan_in, target, num_sets, total_bytes)
            self.runner.run(MERGE.called(target.step), tasks)
            self.runner.work.forget(source.step)
            files = target
        return files


def sources_of_parts(documents: Iterable[DocumentsRecord]) -> Iterator[str]:
    """Names the sources of all files of documents, in the order of the corpus."""
    return (record.source for record in documents for _ in record.files)


def hash_of(*parts: str) -> str:
    """Makes a short name that stands for all the parts together."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def add_counts(records: Iterable[list[Counts]]) -> list[Counts]:
    """Adds up what the tasks have counted in their parts of every set of shards."""
    totals: list[dict[str, Array]] = []
    for counts in records:
        here = [{name: np.array(count) for name, count in one} for one in counts]
        sums = ({name: total[name] + one[name] for name in one} for total, one in zip(totals, here, strict=True))
        totals = [*sums] if totals else here
    return [Counts(**{name: count.tolist() for name, count in total.items()}) for total in totals]


def estimated_bytes(counts: Counts, schema: pa.Schema) -> int:
    """Estimates what the examples of a set take in shards, which decides how many shards there are."""
    piece, position = schema.field("pieces").type.value_type.byte_width, schema.field("boundary").type.byte_width
    example = 4 + 4 + position + schema.field("document").type.byte_width + 1 / 8
    return int(counts.pieces * piece + counts.masked * (piece + position) + counts.examples * example)
