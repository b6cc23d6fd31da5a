"""The steps from text to shards, every one of which is continued where an earlier run left it.

documents  every file becomes Arrow files of documents and their sentences          readers/extraction.py
vocabulary words are counted and a vocabulary is trained, or a given one is copied  vocabulary/
tokens     sentences become pieces                                                  vocabulary/tokens.py
examples   pairs, truncation, masks, for every length and duplicate                 examples/making.py
shards     the global shuffle                                                       examples/shuffle.py

A task writes its files, then its record, all in the work folder (work.py), which goes when the manifest is written.
Nothing here depends on who ran which task, or when: results are taken in the order of tasks.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, replacing, write_json
from data_prep.common.languages import DEFAULT
from data_prep.common.locks import locked
from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.examples.making import ExamplesTask, Parts, all_sets, make_examples, shard_sets
from data_prep.examples.rehearsal import rehearse
from data_prep.examples.shuffle import ShardTask, write_shard
from data_prep.examples.validation import HELD_OUT, choose_held_out
from data_prep.inspection.figures import vocabulary_line
from data_prep.readers.extraction import FIELDED, ExtractTask, extract, try_first_records
from data_prep.readers.reader import Problems, without_place
from data_prep.readers.sources import Bundle, SourceFile, check_names, find_files, make_bundles
from data_prep.readers.summary import left_out_lines, source_lines
from data_prep.settings import Settings
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    FORMAT,
    MANIFEST,
    Manifest,
    ShardSet,
    example_schema,
    map_batches,
    seal,
    write_batches,
)
from data_prep.vocabulary.extension import extend_vocabulary
from data_prep.vocabulary.source import find_vocabulary, short_name
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary, train_vocabulary
from data_prep.work import Record, WorkFolder, file_records, refuse_changes, refuse_foreign

VOCABULARY_PARTS = 64  # files of documents that a vocabulary is trained from, spread over the corpus
LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")
REFUSAL = "another run is at work here ({owner})\nwait for it, or take another --out"
NO_LOCKS = "this file system has no locks; see to it that no other run writes into the folder"


class StepTask(Protocol):
    """A piece of work that a worker can do by itself."""

    @property
    def name(self) -> str:
        """Tells the task from the others of its step."""

    @property
    def weight(self) -> int:
        """Says how much work the task is, for the progress of its step."""


@dataclass
class Pipeline:
    """A run of all the steps into one folder."""

    folder: Path
    settings: Settings
    workers: Workers
    console: Console

    @cached_property
    def work(self) -> WorkFolder:
        """What this run, and any earlier one into the same folder, needs until the shards are finished."""
        return WorkFolder(self.folder)

    def run(self) -> Record:
        """Does what is left to do and returns the manifest."""
        given = find_vocabulary(self.settings.vocab, self.settings.cased) if self.settings.vocab else None
        if given is not None:
            self.settings = replace(self.settings, cased=given.cased)
        files, left_out = self._find_files()
        plan = describe(self.settings, files, given)
        if (self.folder / MANIFEST).exists():
            return self._finished(plan)
        refuse_foreign(self.work)
        with locked(self.work.path / "lock", str(self.folder), REFUSAL, unknown="unknown") as protected:
            if not protected:
                self.console.print(f"note: {NO_LOCKS}")
            self._check_plan(plan)
            self.workers.share(self.work.path)
            return self._run_steps(plan, files, given, left_out)

    def _find_files(self) -> tuple[list[SourceFile], Problems]:
        """Finds what is to be read, and what is left out of it; says so."""
        s, problems = self.settings, Problems(self.settings.errors)
        files = find_files(s.sources, s.formats, self.folder, problems)
        check_names("--text-field", s.text_fields, [file.source for file in files])
        for line in (*source_lines(files, s), *left_out_lines(problems.skipped)):
            self.console.print(line, markup=False, soft_wrap=True)
        if not (self.folder / MANIFEST).exists():
            try_first_records(files, s.text_field_of, s.errors)
        return files, problems

    def _finished(self, plan: Record) -> Record:
        """Returns the manifest of a folder that an earlier run has finished, if that was to do the same."""
        manifest = Manifest.read(self.folder).content
        refuse_changes(self.folder, manifest, plan)
        self._say_vocabulary(manifest["vocabulary"])
        self.console.print(f"{self.folder} is complete already; nothing to do", markup=False)
        self.work.remove()
        return manifest

    def _check_plan(self, plan: Record) -> None:
        """Keeps the plan; refuses to go on from what was done under another one."""
        if self.work.is_begun():
            before = self.work.read_plan()
            if before["settings"]["errors"] == "fail":  # what was read without a fault is the same under any policy
                before["settings"]["errors"] = self.settings.errors
            refuse_changes(self.folder, before, plan)
            self.console.print(f"continuing in {self.folder}", markup=False)
        self.work.write_plan(plan)

    def _run_steps(self, plan: Record, files: list[SourceFile], given: Vocabulary | None, left_out: Problems) -> Record:
        """Runs the steps in their order and writes the manifest, which makes the folder a finished one."""
        documents = self._documents(files)
        size = len(given) if given else self.settings.vocab_size
        said = rehearse(self.settings, size, self.work.path, self.console)
        vocabulary = given if given and not self.settings.extend else self._vocabulary(documents, given)
        self._say_vocabulary(describe_vocabulary(vocabulary, given))
        rehearse(self.settings, len(vocabulary), self.work.path, self.console, said)  # fewer may have a smaller type
        vocabulary_files = vocabulary.write(self.folder)
        tokens = self._tokens(documents, vocabulary)
        self.work.forget("documents", "words")
        parts, num_held_out = self._split(tokens, vocabulary)
        examples = self._examples(tokens, parts)
        tables = [*vocabulary_files, self._write_documents(documents, tokens)]
        sets = self._shards(examples, vocabulary, parts, num_held_out > 0)
        manifest = {
            **plan,
            "format": FORMAT,
            "corpus": corpus_figures(documents, tokens, num_held_out, left_out),
            "vocabulary": describe_vocabulary(vocabulary, given),
            "vocabulary_source": short_name(self.settings.vocab) if self.settings.vocab else None,
            "files": [record.as_json() for record in tables],
            "sets": sets,
            "bytes": sum(record.size for record in tables)
            + sum(shard["size"] for figures in sets for shard in figures["shards"]),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        }
        seal(manifest)
        write_json(self.folder / MANIFEST, manifest)
        self.work.remove()
        return manifest

    # The steps, which return the records of their tasks.

    def _documents(self, files: list[SourceFile]) -> list[Record]:
        """Reads all files into documents; none in a source likely means that it is read as the wrong format."""
        s = self.settings
        tasks = [
            ExtractTask(self.folder, bundle, s.language or DEFAULT, s.text_field_of(bundle.source), s.errors)
            for bundle in make_bundles(files)
        ]
        records = self._step("documents", extract, tasks, "B", num_documents)
        self._refuse_barren([task.bundle for task in tasks], records)
        for line in left_out_lines([fault for record in records for fault in record["skipped"]]):
            self.console.print(line, markup=False, soft_wrap=True)
        return records

    def _refuse_barren(self, bundles: list[Bundle], records: list[Record]) -> None:
        """Raises UserError where all files of a source that have one format have no document in them.

        Where the user wants what cannot be read left out, and the source has other documents, that is said instead.
        """
        kinds = [(bundle.source, bundle.format) for bundle in bundles]
        found: Counter[tuple[str, str]] = Counter()
        for kind, record in zip(kinds, records, strict=True):
            found[kind] += num_documents(record)
        for source, format in [kind for kind, count in found.items() if not count]:
            name, fault = shlex.quote(source), f"no document in {source}, read as {format}"
            field = f", or --text-field {name}=FIELD for the field with the text" if format in FIELDED else ""
            cure = f"say what the files are with --format {name}=FORMAT{field}"
            if self.settings.errors == "skip" and any(found[kind] for kind in found if kind[0] == source):
                warning = f"warning: {fault}: all of that is left out; where it has text, {cure}"
                self.console.print(warning, markup=False, soft_wrap=True, style="yellow")
                continue
            self.work.remove()
            own = (record for kind, record in zip(kinds, records, strict=True) if kind == (source, format))
            faults = [f"  left out: {fault}" for record in own for fault in record["skipped"]][:3]
            raise UserError("\n".join([fault, *faults, f"{cure}; or leave them out"]))

    def _vocabulary(self, documents: list[Record], given: Vocabulary | None) -> Vocabulary:
        """Trains a vocabulary on files of documents from all over the corpus, or adds their words to a given one."""
        if not self.work.is_finished("vocabulary"):
            tasks = self._part_tasks(documents)
            tasks = tasks[:: -(-len(tasks) // VOCABULARY_PARTS)]
            records = self._step("words", count_part, tasks, "B")
            progress = StepProgress(self.console, "vocabulary", "", 1, 0)
            with progress.shown():
                os.environ["TOKENIZERS_PARALLELISM"] = "true"
                counts = add_up(self.folder / file.path for record in records for file in file_records(record))
                if given is None:
                    vocabulary = train_vocabulary(counts, self.settings.vocab_size, self.settings.cased)
                else:
                    extension = extend_vocabulary(given, counts, self.settings.extend)
                    vocabulary = extension.vocabulary
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
            if given is not None:
                self.console.print(str(extension), markup=False, soft_wrap=True)
            vocabulary.write(self.folder)
            self.work.finish("vocabulary", [])
        return load_vocabulary(self.folder / VOCABULARY, self.settings.cased)

    def _say_vocabulary(self, vocabulary: Record) -> None:
        """Says how large the vocabulary is, in every run, where it was made earlier too."""
        s = self.settings
        line = vocabulary_line(s.vocab_size, s.vocab, s.extend, vocabulary)
        self.console.print(line, markup=False, soft_wrap=True)

    def _tokens(self, documents: list[Record], vocabulary: Vocabulary) -> list[Record]:
        """Cuts the sentences of all documents into pieces."""
        tasks = self._part_tasks(documents, vocabulary.sha256)
        return self._step("tokens", encode_part, tasks, "B", lambda record: record["documents"])

    def _part_tasks(self, documents: list[Record], vocabulary: str = "") -> list[PartTask]:
        """Makes a task of every file of documents."""
        files = [file for record in documents for file in record["files"]]
        return [
            PartTask(self.folder, f"{number:06}", file["path"], file["text_bytes"], self.settings.cased, vocabulary)
            for number, file in enumerate(files)
        ]

    def _split(self, tokens: list[Record], vocabulary: Vocabulary) -> tuple[Parts, int]:
        """Numbers the documents and chooses those held out for validation; returns how many are held out, too."""
        firsts = np.cumsum([0, *(record["documents"] for record in tokens)])
        paths = tuple(file_records(record)[0].path for record in tokens)
        if not firsts[-1]:
            raise UserError("no document has any text in it once it is cut into pieces")
        path = self.folder / HELD_OUT
        if not path.exists():
            columns = [np.asarray(map_batches(self.folder / name).get_batch(0)["digest"]) for name in paths]
            with replacing(path) as file:
                np.save(file, choose_held_out(np.concatenate(columns), self.settings.validation, self.settings.seed))
        checksum = FileRecord.of(self.folder, HELD_OUT).sha256
        parts = Parts(paths, tuple(firsts[:-1].tolist()), int(firsts[-1]), checksum, vocabulary.sha256)
        return parts, len(np.load(path))

    def _examples(self, tokens: list[Record], parts: Parts) -> list[Record]:
        """Makes the examples of all documents, which are sorted within the files they go into."""
        tasks = [
            ExamplesTask(self.folder, part, parts, self.settings, record["pieces"])
            for part, record in enumerate(tokens)
            if record["documents"]
        ]
        return self._step("examples", make_examples, tasks, "pieces")

    def _shards(self, examples: list[Record], vocabulary: Vocabulary, parts: Parts, validation: bool) -> list[Record]:
        """Writes the examples of all files into shards, set by set; returns the figures of the sets."""
        sets = all_sets(self.settings, validation)
        totals = [add_counts([record["counts"][number] for record in examples]) for number in range(len(sets))]
        tasks = []
        for shards, total in zip(sets, totals, strict=True):
            schema = example_schema(shards.length, len(vocabulary), parts.num_documents)
            num_shards = max(1, round(estimated_bytes(total, schema) / self.settings.shard_bytes))
            length_index = self.settings.lengths.index(shards.length)
            paths = tuple(record["files"][length_index]["path"] for record in examples)
            batch = shard_sets(shards.length, self.settings.duplicates, validation).index(shards)
            weight = total["pieces"] // num_shards
            tasks += [ShardTask(self.folder, shards, i, num_shards, batch, paths, weight) for i in range(num_shards)]
        written: dict[ShardSet, list[Record]] = {shards: [] for shards in sets}
        for task, record in zip(tasks, self._step("shards", write_shard, tasks, "pieces"), strict=True):
            written[task.shards] += record["files"]
        return [
            {**asdict(shards), **total, "shards": written[shards]} for shards, total in zip(sets, totals, strict=True)
        ]

    def _write_documents(self, documents: list[Record], tokens: list[Record]) -> FileRecord:
        """Writes the table of all documents, in which the number of a document is its row."""

        def batches() -> Iterator[pa.RecordBatch]:
            for source, record in zip(sources_of_parts(documents), tokens, strict=True):
                batch = map_batches(self.folder / file_records(record)[0].path).get_batch(0)
                names = pa.array([source] * batch.num_rows, pa.string())
                yield pa.record_batch([batch["id"], batch["title"], names], schema=DOCUMENTS_SCHEMA)

        return write_batches(self.folder, DOCUMENTS, DOCUMENTS_SCHEMA, batches(), compression="zstd")

    def _step(
        self,
        step: str,
        function: Callable[[Any], Record],
        tasks: Sequence[StepTask],
        unit: str,
        items: Callable[[Record], int] = lambda _: 0,
    ) -> list[Record]:
        """Runs the tasks of a step that have no record yet; returns the records in the order of the tasks."""
        if self.work.is_finished(step):
            return self.work.read_records(step)
        records = {task.name: self.work.read_record(step, task.name) for task in tasks}
        waiting = [task for task in tasks if records[task.name] is None]
        total = sum(task.weight for task in tasks)
        progress = StepProgress(self.console, step, unit, total, total - sum(task.weight for task in waiting))
        with progress.shown():
            for task, record in self.workers.run(function, waiting):
                self.work.write_record(step, task.name, record)
                records[task.name] = record
                progress.advance(task.weight, items(record))
        finished = [record for record in records.values() if record is not None]
        self.work.finish(step, finished)
        return finished


def describe(settings: Settings, files: list[SourceFile], given: Vocabulary | None) -> Record:
    """Tells what a run is going to do: decides whether a folder can be continued, and opens the manifest."""
    return {
        "settings": settings.recorded(),
        "sources": [
            {"source": file.source, "name": file.name, "size": file.size, "format": file.format} for file in files
        ],
        "given_vocabulary": given.sha256 if given else None,
    }


def describe_vocabulary(vocabulary: Vocabulary, given: Vocabulary | None) -> Record:
    """Tells of the vocabulary of the shards what the manifest says; `base_size` where a given one was extended."""
    extended = {"base_size": len(given)} if given and len(given) < len(vocabulary) else {}
    return {"size": len(vocabulary), "sha256": vocabulary.sha256, "cased": vocabulary.cased, **extended}


def num_documents(record: Record) -> int:
    """Counts the documents that a task of the first step has read."""
    return sum(file["rows"] for file in record["files"])


def sources_of_parts(documents: list[Record]) -> list[str]:
    """Names the sources of all files of documents, in the order of the corpus."""
    return [record["source"] for record in documents for _ in record["files"]]


def estimated_bytes(counts: Record, schema: pa.Schema) -> int:
    """Estimates what the examples of a set take in shards, which decides how many shards there are."""
    piece, position = schema.field("pieces").type.value_type.byte_width, schema.field("boundary").type.byte_width
    example = 4 + 4 + position + schema.field("document").type.byte_width + 1 / 8
    return int(counts["pieces"] * piece + counts["masked"] * (piece + position) + counts["examples"] * example)


def add_counts(counts: list[Record]) -> Record:
    """Adds up what the tasks have counted in their parts of one set of shards."""
    return {name: np.array([count[name] for count in counts]).sum(axis=0).tolist() for name in counts[0]}


def corpus_figures(documents: list[Record], tokens: list[Record], validation: int, left_out: Problems) -> Record:
    """Sums up the corpus in the numbers that the manifest has of it."""
    by_source: Counter[str] = Counter()
    for source, record in zip(sources_of_parts(documents), tokens, strict=True):
        by_source[source] += record["documents"]
    names = ("documents", "empty", "sentences", "pieces", "unknown", "text_bytes")
    faults = left_out.skipped + [fault for record in documents for fault in record["skipped"]]
    return {
        **{name: sum(record[name] for record in tokens) for name in names},
        "validation_documents": validation,
        "documents_by_source": dict(by_source),
        "skipped": [without_place(fault, left_out.names) for fault in faults],
        "replaced": sum(record["replaced"] for record in documents),
    }
