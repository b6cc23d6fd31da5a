"""The steps from text to shards, each of which is continued where an earlier run left it.

documents  every file becomes Arrow files of documents and their sentences          extraction.py
vocabulary words are counted and a vocabulary is trained, or a given one is copied  vocabulary.py
tokens     sentences become pieces                                                  tokens.py
examples   pairs, truncation, masks, for each length and duplicate                  examples.py
shards     the global shuffle                                                       shuffle.py

A task writes its files, then its record; a step that has all records writes them into STEP.json, and what it read is
deleted. All of this happens in the folder `.cloze-work`, which goes when the manifest is written. Nothing here depends
on who ran which task, or when: results are taken in the order of tasks.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from rich.console import Console

from data_prep.common.compiled import nothing_compiled_yet
from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, read_json, replacing, write_json
from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.examples.making import HELD_OUT, ExamplesTask, Parts, all_sets, make_examples, shard_sets
from data_prep.examples.shuffle import ShardTask, write_shard
from data_prep.examples.validation import held_out
from data_prep.readers.extraction import ExtractTask, extract
from data_prep.readers.sources import SourceFile, find_files, make_bundles
from data_prep.settings import Settings
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    FORMAT,
    MANIFEST,
    WORK,
    Manifest,
    ShardSet,
    example_schema,
    fingerprint,
    map_batches,
    write_batches,
)
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part, token_file
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary, train_vocabulary

Record = dict[str, Any]
STEPS = ("documents", "words", "vocabulary", "tokens", "examples", "shards")
VOCABULARY_PARTS = 64  # files of documents that a vocabulary is trained from, spread over the corpus
LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")


class StepTask(Protocol):
    """Something that a worker can do by itself."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> int: ...


@dataclass
class Pipeline:
    """A run of all the steps into one folder."""

    folder: Path
    settings: Settings
    workers: Workers
    console: Console

    def run(self) -> Record:
        """Does what is left to do and returns the manifest."""
        given = load_vocabulary(self.settings.vocab, self.settings.cased) if self.settings.vocab else None
        files = find_files(self.settings.sources, self.settings.format, self.folder)
        plan = describe(self.settings, files, given)
        if (self.folder / MANIFEST).exists():
            return self._finished(plan)
        refuse_foreign(self.folder)
        with locked(self.folder, self.console):
            self._check_plan(plan)
            return self._run_steps(plan, files, given)

    def _finished(self, plan: Record) -> Record:
        manifest = Manifest.read(self.folder).content
        refuse_changes(self.folder, manifest, plan)
        self.console.print(f"{self.folder} is complete already; nothing to do", markup=False)
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        return manifest

    def _check_plan(self, plan: Record) -> None:
        path = self.folder / WORK / "plan.json"
        if path.exists() and self._anything_done():
            before = read_json(path)
            if before["settings"]["errors"] == "fail":  # what was read without a fault is the same under any policy
                before["settings"]["errors"] = self.settings.errors
            refuse_changes(self.folder, before, plan)
            self.console.print(f"continuing in {self.folder}", markup=False)
        write_json(path, plan)

    def _anything_done(self) -> bool:
        work = self.folder / WORK
        return any(work.glob("records/*/*.json")) or any((work / f"{step}.json").exists() for step in STEPS)

    def _run_steps(self, plan: Record, files: list[SourceFile], given: Vocabulary | None) -> Record:
        if nothing_compiled_yet():
            self.console.print("the first run compiles its loops: the first files of a step take some seconds more")
        documents = self._documents(files)
        vocabulary = given or self._vocabulary(documents)
        vocabulary_files = vocabulary.write(self.folder)
        tokens = self._tokens(documents, vocabulary)
        self._forget("documents", "words")
        parts, num_held_out = self._split(tokens, vocabulary)
        examples = self._examples(tokens, parts)
        tables = [*vocabulary_files, self._write_documents(documents, tokens)]
        sets = self._shards(examples, vocabulary, parts, num_held_out > 0)
        manifest = {
            **plan,
            "format": FORMAT,
            "corpus": corpus_figures(documents, tokens, num_held_out),
            "vocabulary": {"size": len(vocabulary), "sha256": vocabulary.sha256, "cased": vocabulary.cased},
            "files": [record.as_json() for record in tables],
            "sets": sets,
            "bytes": sum(record.size for record in tables) + sum(s["size"] for each in sets for s in each["shards"]),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        }
        manifest["fingerprint"] = fingerprint(manifest)
        write_json(self.folder / MANIFEST, manifest)
        shutil.rmtree(self.folder / WORK, ignore_errors=True)  # on NFS the lock stays until we end
        return manifest

    # The steps. Each returns its records in the order of its tasks.

    def _documents(self, files: list[SourceFile]) -> list[Record]:
        s = self.settings
        tasks = [ExtractTask(self.folder, each, s.language, s.text_field, s.errors) for each in make_bundles(files)]
        records = self._step("documents", extract, tasks, "B", lambda record: sum(f["rows"] for f in record["files"]))
        found = Counter({record["source"]: 0 for record in records})
        for record in records:
            found[record["source"]] += sum(file["rows"] for file in record["files"])
        barren = [source for source, count in found.items() if not count]
        if barren:
            formats = {file.format for file in files if file.source in barren}
            shutil.rmtree(self.folder / WORK, ignore_errors=True)
            raise UserError(
                f"no document in {', '.join(barren)}, read as {', '.join(sorted(formats))}\n"
                "say what the files are with --format, or leave the source out"
            )
        return records

    def _vocabulary(self, documents: list[Record]) -> Vocabulary:
        done = self.folder / WORK / "vocabulary.json"
        if not done.exists():
            tasks = self._part_tasks(documents)
            tasks = tasks[:: -(-len(tasks) // VOCABULARY_PARTS)]
            records = self._step("words", count_part, tasks, "B")
            progress = StepProgress(self.console, "vocabulary", "", 1, 0)
            with progress.shown():
                os.environ["TOKENIZERS_PARALLELISM"] = "true"
                counts = add_up(self.folder / record["files"][0]["path"] for record in records)
                vocabulary = train_vocabulary(counts, self.settings.vocab_size, self.settings.cased)
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
            vocabulary.write(self.folder)
            write_json(done, {"records": []})
        return load_vocabulary(self.folder / VOCABULARY, self.settings.cased)

    def _tokens(self, documents: list[Record], vocabulary: Vocabulary) -> list[Record]:
        tasks = self._part_tasks(documents, vocabulary.sha256)
        return self._step("tokens", encode_part, tasks, "B", lambda record: record["documents"])

    def _part_tasks(self, documents: list[Record], vocabulary: str = "") -> list[PartTask]:
        files = [file for record in documents for file in record["files"]]
        return [
            PartTask(self.folder, f"{number:06}", file["path"], file["text_bytes"], self.settings.cased, vocabulary)
            for number, file in enumerate(files)
        ]

    def _split(self, tokens: list[Record], vocabulary: Vocabulary) -> tuple[Parts, int]:
        """Numbers the documents, and chooses those held out."""
        counts = [record["documents"] for record in tokens]
        firsts = np.cumsum([0, *counts])
        paths = tuple(token_file(record).path for record in tokens)
        if not firsts[-1]:
            raise UserError("no document has any text in it once it is cut into pieces")
        path = self.folder / HELD_OUT
        if not path.exists():
            digests = np.concatenate(
                [np.asarray(map_batches(self.folder / each).get_batch(0)["digest"]) for each in paths]
            )
            with replacing(path) as file:
                np.save(file, held_out(digests, self.settings.validation, self.settings.seed))
        record = FileRecord.of(self.folder, HELD_OUT)
        parts = Parts(paths, tuple(firsts[:-1].tolist()), int(firsts[-1]), record.sha256, vocabulary.sha256)
        return parts, len(np.load(path))

    def _examples(self, tokens: list[Record], parts: Parts) -> list[Record]:
        tasks = [
            ExamplesTask(self.folder, part, parts, self.settings, record["pieces"])
            for part, record in enumerate(tokens)
            if record["documents"]
        ]
        return self._step("examples", make_examples, tasks, "pieces")

    def _shards(self, examples: list[Record], vocabulary: Vocabulary, parts: Parts, validation: bool) -> list[Record]:
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
        """The table of all documents, by their numbers."""
        sources = [record["source"] for record in documents for _ in record["files"]]

        def batches() -> Iterator[pa.RecordBatch]:
            for source, record in zip(sources, tokens, strict=True):
                batch = map_batches(self.folder / token_file(record).path).get_batch(0)
                names = pa.array([source] * batch.num_rows, pa.string())
                yield pa.record_batch([batch["id"], batch["title"], names], schema=DOCUMENTS_SCHEMA)

        return write_batches(self.folder, DOCUMENTS, DOCUMENTS_SCHEMA, batches(), compression="zstd")

    # How any step is run, and continued.

    def _step(
        self,
        step: str,
        function: Callable[[Any], Record],
        tasks: Sequence[StepTask],
        unit: str,
        items: Callable[[Record], int] = lambda record: 0,
    ) -> list[Record]:
        """Runs the tasks that have no record yet."""
        summary = self.folder / WORK / f"{step}.json"
        if summary.exists():
            return list(read_json(summary)["records"])
        records = {task.name: self._record_of(step, task) for task in tasks}
        waiting = [task for task in tasks if records[task.name] is None]
        total = sum(task.weight for task in tasks)
        progress = StepProgress(self.console, step, unit, total, total - sum(task.weight for task in waiting))
        with progress.shown():
            for task, record in self.workers.run(function, waiting):
                write_json(self._record_path(step, task), record)
                records[task.name] = record
                progress.advance(task.weight, items(record))
        write_json(summary, {"records": list(records.values())})
        shutil.rmtree(self.folder / WORK / "records" / step, ignore_errors=True)
        return [record for record in records.values() if record is not None]

    def _record_path(self, step: str, task: StepTask) -> Path:
        return self.folder / WORK / "records" / step / f"{task.name}.json"

    def _record_of(self, step: str, task: StepTask) -> Record | None:
        """The record of a task that was done in an earlier run, if its files are still whole in size."""
        try:
            record: Record = read_json(self._record_path(step, task))
        except (FileNotFoundError, DamageError):
            return None
        for file in record["files"]:
            path = self.folder / file["path"]
            if not path.is_file() or path.stat().st_size != file["size"]:
                return None
        return record

    def _forget(self, *steps: str) -> None:
        """Deletes the files of steps whose results are not needed any more."""
        for step in steps:
            shutil.rmtree(self.folder / WORK / step, ignore_errors=True)


def describe(settings: Settings, files: list[SourceFile], given: Vocabulary | None) -> Record:
    """What a run is going to do: decides whether a folder can be continued, and opens the manifest."""
    return {
        "settings": settings.recorded(),
        "sources": [
            {"source": file.source, "name": file.name, "size": file.size, "format": file.format} for file in files
        ],
        "given_vocabulary": given.sha256 if given else None,
    }


def refuse_changes(folder: Path, before: Record, now: Record) -> None:
    """Raises UserError if a folder was begun with other settings or sources."""
    changes = [
        f"  --{name.replace('_', '-')} was {before['settings'].get(name)}, now {value}"
        for name, value in now["settings"].items()
        if before["settings"].get(name) != value
    ]
    if before["sources"] != now["sources"]:
        old, new = ({(s["source"], s["name"], s["size"]) for s in each["sources"]} for each in (before, now))
        example = next(iter(sorted(old ^ new)), None)
        changes.append(f"  --docs: {len(old ^ new)} files differ" + (f", such as {example[1]}" if example else ""))
    if before["given_vocabulary"] != now["given_vocabulary"]:
        changes.append("  --vocab: another vocabulary")
    if changes:
        raise UserError(
            f"{folder} was made with other settings:\n" + "\n".join(changes) + "\n"
            "give the same settings to continue, another --out, or remove the folder"
        )


def estimated_bytes(counts: Record, schema: pa.Schema) -> int:
    """What the examples take in shards."""
    piece, position = schema.field("pieces").type.value_type.byte_width, schema.field("boundary").type.byte_width
    each = 4 + 4 + position + schema.field("document").type.byte_width + 1 / 8
    return int(counts["pieces"] * piece + counts["masked"] * (piece + position) + counts["examples"] * each)


def add_counts(counts: list[Record]) -> Record:
    """The counts of several parts of a set together."""
    total: Record = {}
    for key in counts[0]:
        values = np.array([each[key] for each in counts])
        total[key] = values.sum(axis=0).tolist()
    return total


def corpus_figures(documents: list[Record], tokens: list[Record], validation: int) -> Record:
    """The corpus in numbers."""
    sums = {
        key: sum(record[key] for record in tokens) for key in ("documents", "empty", "sentences", "pieces", "unknown")
    }
    by_source: Counter[str] = Counter()
    sources = [record["source"] for record in documents for _ in record["files"]]
    for source, record in zip(sources, tokens, strict=True):
        by_source[source] += record["documents"]
    return {
        **sums,
        "text_bytes": sum(record["text_bytes"] for record in tokens),
        "validation_documents": validation,
        "documents_by_source": dict(by_source),
        "skipped": [each for record in documents for each in record["skipped"]],
        "replaced": sum(record["replaced"] for record in documents),
    }


def refuse_foreign(folder: Path) -> None:
    """Raises UserError for a folder that holds something else: we write into empty folders and our own."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / WORK).is_dir():
        raise UserError(f"{folder}: holds other files already; give --out a new folder")


@contextmanager
def locked(folder: Path, console: Console) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it."""
    path = folder / WORK / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder}: another run is at work here ({file.read().strip() or 'unknown'})\n"
                "wait for it, or take another --out"
            ) from None
        except OSError:
            console.print("note: this file system has no locks; see to it that no other run writes into the folder")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
