"""The steps from text to shards, which a run, the sample of a forecast and a rehearsal go through alike.

documents  every file becomes Arrow files of documents and their sentences          readers/extraction.py
words      are counted where a vocabulary is trained or extended                    vocabulary/
tokens     sentences become pieces, which are kept                                  vocabulary/tokens.py
(chosen)   some documents are left out, held out or repeated                        choosing.py
examples   pairs, truncation, masks, for every duplicate of a length                examples/making.py
(merged)   sorted examples of many parts come into fewer files                      examples/merging.py
shards     the global shuffle; then the next length                                 examples/merging.py

Nothing here depends on who ran which task, or when: results are taken in the order of tasks.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord
from data_prep.common.languages import DEFAULT
from data_prep.common.progress import StepProgress
from data_prep.examples import merging
from data_prep.examples.making import ExamplesPlan, ExamplesTask, list_shard_sets, make_examples
from data_prep.examples.merging import MOST_FILES, ShardTask, SortedFiles
from data_prep.examples.parts import HELD_OUT, PARTS, read_parts
from data_prep.origins import TAKE, Origins
from data_prep.pipeline.choosing import Choosing, Chosen, require_text
from data_prep.readers.extraction import ExtractTask, extract
from data_prep.readers.filters import Filter, make_filters
from data_prep.readers.sources import Bundle
from data_prep.running import Runner, Step
from data_prep.settings import Settings
from data_prep.shards import DOCUMENTS, NEAR_REPORT, Counts, SetFigures, example_schema
from data_prep.vocabulary.extending import extend_vocabulary
from data_prep.vocabulary.kinds.declaration import find_kind, load_vocabulary
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import DocumentsRecord, ExamplesRecord, Record, Records, TokensRecord

READ = Step("documents", extract, DocumentsRecord, "B")
COUNT = Step("words", count_part, Record, "B")
ENCODE = Step("tokens", encode_part, TokensRecord, "B")
MAKE_EXAMPLES = Step("examples", make_examples, ExamplesRecord, "pieces")
MERGE = Step("merged", merging.merge, Record, "B", after=merging.delete_merged)
WRITE_SHARDS = Step("shards", merging.write_shard, Record, "pieces")

TRAINED = "vocabulary"  # is done at once
VOCABULARY_PARTS = 64  # files of documents that a vocabulary is trained from, spread over the corpus
KEY_BYTES = 8  # of the shuffling key of an example, which shards do not have


class Made(NamedTuple):
    """The files and figures that a run has made."""

    tables: list[FileRecord]
    """The files that are no shards."""
    chosen: Chosen
    figures: list[SetFigures]


@dataclass(frozen=True)
class Steps:
    """Goes through the steps with the settings of a run."""

    runner: Runner
    settings: Settings

    @property
    def folder(self) -> Path:
        """Names the output folder."""
        return self.runner.work.out

    @cached_property
    def filters(self) -> tuple[Filter, ...]:
        """Makes the filters of the settings, which all tasks that read have."""
        return make_filters(self.settings)

    def extract_task(self, bundle: Bundle) -> ExtractTask:
        """Makes the task that reads a bundle."""
        s = self.settings
        language = s.language_of(bundle.source) or DEFAULT
        field = s.text_field_of(bundle.source)
        return ExtractTask(self.folder, bundle, language, field, s.errors, self.filters)

    def read(self, bundles: list[Bundle]) -> Iterable[DocumentsRecord]:
        """Reads all files into documents."""
        return self.runner.run(READ, lambda: map(self.extract_task, bundles)) if bundles else []

    def make_vocabulary(self, documents: Iterable[DocumentsRecord], given: Vocabulary | None) -> Vocabulary:
        """Trains a vocabulary on files of documents from all over the corpus, or adds their words to a given one."""
        s, work, console = self.settings, self.runner.work, self.runner.console
        if given and not s.extend:
            return given
        stride = -(-sum(len(record.files) for record in documents) // VOCABULARY_PARTS)
        tasks = list(islice(self.part_tasks(documents), 0, None, max(stride, 1)))
        key = hash_parts(*(task.name for task in tasks))
        if not work.is_finished(TRAINED, key):
            paths = [self.folder / record.path for record in self.runner.run(COUNT, lambda: tasks)]
            with StepProgress(console, TRAINED, "", 1, 0).show():
                os.environ["TOKENIZERS_PARALLELISM"] = "true"
                counts = add_up(paths)
                extension = extend_vocabulary(given, counts, s.extend) if given else None
                kind = find_kind(s.tokenizer)
                made = extension.vocabulary if extension else kind.train(counts, s.vocab_size, s.cased)
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
            if extension:
                console.print(str(extension), markup=False, soft_wrap=True)
            work.reopen(TRAINED)
            made.write(self.folder)
            work.finish(TRAINED, key)
        return load_vocabulary(self.folder, s.cased)

    def part_tasks(self, documents: Iterable[DocumentsRecord], vocabulary_sha256: str = "") -> Iterator[PartTask]:
        """Makes a task of every file of documents."""
        for record in documents:
            for file in record.files:
                s, source = self.settings, record.source
                yield PartTask(self.folder, file.path, file.text_bytes, s.cased, s.tokenizer, source, vocabulary_sha256)

    def cut_documents(self, documents: Iterable[DocumentsRecord], vocabulary: Vocabulary) -> Iterable[TokensRecord]:
        """Cuts documents into pieces, which are kept; their text is needed no more."""
        vocabulary.write(self.folder)
        if not any(record.files for record in documents):
            return []
        tokens = self.runner.run(ENCODE, lambda: self.part_tasks(documents, vocabulary.sha256))
        self.runner.work.forget(READ.name, COUNT.name)
        return tokens

    def take(self, origins: Origins) -> Iterable[TokensRecord]:
        """Checks the files of documents in the folders that --from names; returns a record of each."""
        if not origins.folders:
            return []
        return self.runner.run(TAKE, lambda: origins.make_tasks(self.folder, self.settings.errors))

    def keep(self, tokens: Iterable[TokensRecord], vocabulary: Vocabulary) -> Made:
        """Leaves the documents in pieces as they are: writes the vocabulary, deletes shards of an earlier start."""
        require_text(tokens)
        self.runner.work.remove_shards(self.settings.lengths)
        for name in (DOCUMENTS, NEAR_REPORT):
            (self.folder / name).unlink(missing_ok=True)
        return Made(vocabulary.write(self.folder), Chosen(tokens, tokens, 0), [])

    def make_shards(self, tokens: Iterable[TokensRecord], vocabulary: Vocabulary) -> Made:
        """Chooses among documents in pieces, and makes shards of every length."""
        choosing = Choosing(self.runner, self.settings, vocabulary)
        tables, chosen = vocabulary.write(self.folder), choosing.choose(tokens)
        tables.append(choosing.write_documents(chosen.parts))
        if self.settings.near_copies is not None:
            tables.append(FileRecord.from_file(self.folder, NEAR_REPORT))
        checksums = [FileRecord.from_file(self.folder, name).sha256 for name in (PARTS, HELD_OUT)]
        key = hash_parts(*checksums, vocabulary.sha256)
        lengths = [self._make_length(length, key, len(vocabulary)) for length in self.settings.lengths]
        return Made(tables, chosen, [figures for one in lengths for figures in one])

    def _make_length(self, length: int, corpus_key: str, vocabulary_size: int) -> list[SetFigures]:
        """Makes the shards of a length, and deletes all that was needed for them alone."""
        s, parts = self.settings, read_parts(self.folder)
        sets = list_shard_sets(length, s.duplicates, parts.held_out.size > 0)
        made = SortedFiles(length, len(parts.paths), apart=len(parts.paths) <= MOST_FILES)
        plan = ExamplesPlan(self.folder, corpus_key, made, s)

        def example_tasks() -> Iterator[ExamplesTask]:
            return (ExamplesTask(self.folder, part, pieces, plan) for part, pieces in enumerate(parts.pieces.tolist()))

        examples = self.runner.run(replace(MAKE_EXAMPLES, name=made.step), example_tasks)
        totals = add_counts(record.counts for record in examples)
        schema = example_schema(length, vocabulary_size, parts.num_documents)
        sizes = [estimate_bytes(total, schema) for total in totals]
        keyed = sum(sizes) + KEY_BYTES * sum(total.examples for total in totals)
        files = self._merge(made, keyed, len(sets))
        shards = [max(1, round(size / s.shard_bytes)) for size in sizes]

        def shard_tasks() -> Iterator[ShardTask]:
            for number, (one, total, count) in enumerate(zip(sets, totals, shards, strict=True)):
                for index in range(count):
                    yield ShardTask(self.folder, index, total.pieces // count, one, count, number, files)

        written = iter(self._write_shards(f"{WRITE_SHARDS.name}-{length}", files, shard_tasks))
        self.runner.work.forget(files.step)
        return [
            SetFigures(
                **asdict(one),
                **total.as_json(),
                shards=[file for record in islice(written, count) for file in record.files],
            )
            for one, total, count in zip(sets, totals, shards, strict=True)
        ]

    def _write_shards(self, name: str, files: SortedFiles, tasks: Callable[[], Iterable[ShardTask]]) -> Records[Record]:
        """Writes the shards of a length, and deletes the examples of each set as soon as all its shards are there."""
        work = self.runner.work
        done = {task for task, _ in work.find_whole_tasks(name)}
        left = Counter(task.set_index for task in tasks() if task.name not in done)
        if any(not (work.path / files.folder_of(one)).is_dir() for one in left) and not work.is_finished(name):
            raise UserError(
                f"{self.folder}: a shard was damaged after the examples that it was made of were deleted\n"
                "remove the folder and run the same command again"
            )

        def finish(task: ShardTask) -> None:
            left[task.set_index] -= 1
            if not left[task.set_index]:
                work.forget(files.folder_of(task.set_index))

        return self.runner.run(replace(WRITE_SHARDS, name=name, after=finish), tasks)

    def _merge(self, files: SortedFiles, total_bytes: int, num_sets: int) -> SortedFiles:
        """Merges files of examples in as many rounds as it takes, and deletes each as soon as it is merged."""
        for source, fan_in, target in merging.merging_rounds(files, total_bytes, num_sets):
            tasks = partial(merging.make_merge_tasks, self.folder, source, fan_in, target, num_sets, total_bytes)
            self.runner.run(replace(MERGE, name=target.step), tasks)
            self.runner.work.forget(source.step)
            files = target
        return files


def hash_parts(*parts: str) -> str:
    """Hashes some texts together to a short name."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def add_counts(records: Iterable[list[Counts]]) -> list[Counts]:
    """Adds up what the tasks have counted in their parts of every set of shards."""
    totals: list[dict[str, Array]] = []
    for counts in records:
        here = [{name: np.array(count) for name, count in one} for one in counts]
        pairs = zip(totals, here, strict=True) if totals else ()
        totals = [{name: total[name] + one[name] for name in one} for total, one in pairs] or here
    return [Counts(**{name: count.tolist() for name, count in total.items()}) for total in totals]


def estimate_bytes(counts: Counts, schema: pa.Schema) -> int:
    """Estimates what the examples of a set take in shards, which decides how many shards there are."""
    piece, position = schema.field("pieces").type.value_type.byte_width, schema.field("boundary").type.byte_width
    example = 4 + 4 + position + schema.field("document").type.byte_width + 1 / 8
    return int(counts.pieces * piece + counts.masked * (piece + position) + counts.examples * example)
