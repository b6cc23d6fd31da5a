"""The steps from text to shards, every one of which is continued where an earlier run left it.

documents  every file becomes Arrow files of documents and their sentences          readers/extraction.py
vocabulary words are counted and a vocabulary is trained, or a given one is copied  vocabulary/
tokens     sentences become pieces                                                  vocabulary/tokens.py
(chosen)   copies and what is over a share are left out, some documents held out    examples/selection.py
examples   pairs, truncation, masks, for every duplicate of a length                examples/making.py
(merged)   sorted examples of many parts come into fewer files                      examples/merging.py
shards     the global shuffle; then the next length                                 examples/shard_files.py

A task writes its files, then its record, all in the work folder (work.py), which goes when the manifest is written.
Nothing here depends on who ran which task, or when: results are taken in the order of tasks.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from data_prep.common.capacity import num_cores
from data_prep.common.errors import UserError
from data_prep.common.files import FileRecord, write_json
from data_prep.common.languages import DEFAULT
from data_prep.common.locks import locked
from data_prep.common.progress import StepProgress
from data_prep.common.workers import Workers
from data_prep.examples.lengths import Length
from data_prep.examples.selection import MARKED, SPLIT, Selection, hash_of
from data_prep.examples.sifting import SHARES_TOO_SMALL
from data_prep.forecast import disk_note, expanded, forecast, steps_of, usual_costs
from data_prep.inspection.figures import vocabulary_line
from data_prep.readers.extraction import FIELDED, ExtractTask, extract, try_first_records
from data_prep.readers.reader import Problems, without_place
from data_prep.readers.sources import LARGEST_BUNDLE, Bundle, SourceFile, check_names, find_files, make_bundles
from data_prep.readers.summary import left_out_lines, source_lines
from data_prep.rehearsal import rehearse
from data_prep.running import Runner
from data_prep.settings import Settings
from data_prep.shards import (
    DOCUMENTS,
    DOCUMENTS_SCHEMA,
    FORMAT,
    MANIFEST,
    Manifest,
    length_folder,
    map_batches,
    seal,
    write_batches,
)
from data_prep.vocabulary.extension import extend_vocabulary
from data_prep.vocabulary.source import find_vocabulary, short_name
from data_prep.vocabulary.tokens import PartTask, add_up, count_part, encode_part
from data_prep.vocabulary.vocabulary import VOCABULARY, Vocabulary, load_vocabulary, train_vocabulary
from data_prep.work import (
    SOURCE_KEYS,
    Record,
    Records,
    WorkFolder,
    changed_settings,
    changed_sources,
    file_records,
    missing_sources,
    refuse_changes,
    refuse_foreign,
)

VOCABULARY_PARTS = 64  # files of documents that a vocabulary is trained from, spread over the corpus
LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")
READING = ("format", "text_field")  # settings by which files are read, which a task is named after
REFUSAL = "another run is at work here ({owner})\nwait for it, or take another --out"
NO_LOCKS = "this file system has no locks; see to it that no other run writes into the folder"


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

    @cached_property
    def runner(self) -> Runner:
        """What does the tasks of the steps."""
        return Runner(self.work, self.workers, self.console)

    def run(self) -> Record:
        """Does what is left to do and returns the manifest."""
        given = self._given_vocabulary()
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
            self._note_disk(files)
            return self._run_steps(plan, files, given, left_out)

    def forecast(self) -> None:
        """Says what a run will take; makes nothing."""
        given, (files, _) = self._given_vocabulary(), self._find_files()
        forecast(self.settings, given, files, self.folder, self.settings.workers or num_cores(), self.console)

    def _given_vocabulary(self) -> Vocabulary | None:
        """Finds the vocabulary that the user names, if any, and takes over whether it keeps case."""
        if not self.settings.vocab:
            return None
        given = find_vocabulary(self.settings.vocab, self.settings.cased)
        self.settings = self.settings.model_copy(update={"cased": given.cased})
        return given

    def _find_files(self) -> tuple[list[SourceFile], Problems]:
        """Finds what is to be read, and what is left out of it; says so."""
        s, problems = self.settings, Problems(self.settings.errors)
        files = find_files(s.sources, s.formats, self.folder, problems)
        named_sources: dict[str, Mapping[str, object]] = {
            "--text-field": s.text_fields,
            "--language": s.languages,
            "--max-share": s.max_shares,
        }
        for flag, named in named_sources.items():
            check_names(flag, named, [file.source for file in files])
        if {file.source for file in files} <= s.max_shares.keys() and sum(s.max_shares.values()) <= 1:
            raise UserError(SHARES_TOO_SMALL)
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

    def _note_disk(self, files: list[SourceFile]) -> None:
        """Says so where the disk likely has too little room for the run."""
        size = expanded(files)
        parts = max(1, round(size / LARGEST_BUNDLE))
        if note := disk_note(self.folder, steps_of(self.settings, usual_costs(self.settings), size, parts)):
            self.console.print(f"warning: {note}", markup=False, soft_wrap=True, style="yellow")

    def _check_plan(self, plan: Record) -> None:
        """Keeps the plan; refuses to go on from what was done with other settings.

        Where files of the text were repaired, added or taken away, only what comes of them is done anew.
        """
        if self.work.is_begun():
            before = self.work.read_plan()
            if before["settings"]["errors"] == "fail":  # what was read without a fault is the same under any policy
                before["settings"]["errors"] = self.settings.errors
            reading = {name: plan["settings"][name] for name in READING}
            read_anew = [f"--{name}" for name in READING if before["settings"][name] != reading[name]]
            before["settings"] |= reading
            if changed_settings(before, plan):
                refuse_changes(self.folder, before, plan)
            if self.work.is_finished(SPLIT) and (gone := missing_sources(before, plan)):
                raise UserError(
                    f"{self.folder}: {len(gone)} of the files that it was begun with are gone, such as {gone[0]}\n"
                    "bring them back, or start anew in another --out: all examples would be others without them"
                )
            self.console.print(f"continuing in {self.folder}", markup=False)
            names = changed_sources(before, plan)
            if names is not None or read_anew:
                self._take_changes([*(names or []), *read_anew])
        self.work.write_plan(plan)

    def _take_changes(self, names: list[str]) -> None:
        """Goes back to the first step, whose tasks keep what they read of files that are as they were."""
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        change = f"changed since the run began: {names[0]}{others}" if names else "the order of the files changed"
        self.console.print(f"{change}; what comes of the other files is kept as far as it can be", markup=False)
        kept = ("documents", "words", "tokens")
        self.work.reopen(*kept)
        self.work.undo(MARKED, SPLIT, *(step for step in self.work.steps() if step not in kept))
        for length in self.settings.lengths:
            shutil.rmtree(self.folder / length_folder(length), ignore_errors=True)

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
        selection = Selection(self.runner, self.folder, self.settings, vocabulary)
        chosen = selection.sift(tokens, lambda: sources_of_parts(documents))
        key, num_held_out = selection.split(chosen)
        tables = [*vocabulary_files, self._write_documents(documents, chosen)]
        settings = self.settings.model_copy(
            update={"docs": ()}
        )  # whose names may be many, and every task has the settings
        lengths = [Length(length, self.folder, key, settings, len(vocabulary)) for length in settings.lengths]
        sets = [figures for length in lengths for figures in length.make(self.runner)]
        manifest = {
            **plan,
            "format": FORMAT,
            "corpus": corpus_figures(documents, chosen, num_held_out, left_out),
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

    def _documents(self, files: list[SourceFile]) -> Records:
        """Reads all files into documents; none in a source likely means that it is read as the wrong format."""
        s, bundles = self.settings, make_bundles(files)

        def tasks() -> Iterator[ExtractTask]:
            for bundle in bundles:
                text_field = s.text_field_of(bundle.source)
                language = s.language_of(bundle.source) or DEFAULT
                yield ExtractTask(self.folder, bundle, language, text_field, s.errors, s.formulas)

        records = self.runner.run("documents", extract, tasks, "B", num_documents)
        self._refuse_barren(bundles, records)
        for line in left_out_lines([fault for record in records for fault in record["skipped"]]):
            self.console.print(line, markup=False, soft_wrap=True)
        return records

    def _refuse_barren(self, bundles: list[Bundle], records: Records) -> None:
        """Raises UserError where all files of a source that have one format have no document in them.

        Where the user wants what cannot be read left out, and the source has other documents, that is said instead.
        """
        found: Counter[tuple[str, str]] = Counter()
        for bundle, record in zip(bundles, records, strict=True):
            found[bundle.source, bundle.format] += num_documents(record)
        for source, format in [kind for kind, count in found.items() if not count]:
            name, fault = shlex.quote(source), f"no document in {source}, read as {format}"
            field = f", or --text-field {name}=FIELD for the field with the text" if format in FIELDED else ""
            cure = f"say what the files are with --format {name}=FORMAT{field}"
            if self.settings.errors == "skip" and any(found[kind] for kind in found if kind[0] == source):
                warning = f"warning: {fault}: all of that is left out; where it has text, {cure}"
                self.console.print(warning, markup=False, soft_wrap=True, style="yellow")
                continue
            pairs = zip(bundles, records, strict=True)
            own = (record for bundle, record in pairs if (bundle.source, bundle.format) == (source, format))
            faults = [f"  left out: {fault}" for record in own for fault in record["skipped"]][:3]
            if not found.total():
                self.work.remove()
            raise UserError("\n".join([fault, *faults, f"{cure}; or leave them out"]))

    def _vocabulary(self, documents: Records, given: Vocabulary | None) -> Vocabulary:
        """Trains a vocabulary on files of documents from all over the corpus, or adds their words to a given one."""
        stride = -(-sum(len(record["files"]) for record in documents) // VOCABULARY_PARTS)
        tasks = list(islice(self._part_tasks(documents), 0, None, max(stride, 1)))
        key = hash_of(*(task.name for task in tasks))
        if not self.work.is_finished("vocabulary", key):
            records = self.runner.run("words", count_part, lambda: tasks, "B")
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
            self.work.reopen("vocabulary")
            vocabulary.write(self.folder)
            self.work.finish("vocabulary", key)
        return load_vocabulary(self.folder / VOCABULARY, self.settings.cased)

    def _say_vocabulary(self, vocabulary: Record) -> None:
        """Says how large the vocabulary is, in every run, where it was made earlier too."""
        s = self.settings
        line = vocabulary_line(s.vocab_size, s.vocab, s.extend, vocabulary)
        self.console.print(line, markup=False, soft_wrap=True)

    def _tokens(self, documents: Records, vocabulary: Vocabulary) -> Records:
        """Cuts the sentences of all documents into pieces."""
        return self.runner.run(
            "tokens",
            encode_part,
            lambda: self._part_tasks(documents, vocabulary.sha256),
            "B",
            lambda record: record["documents"],
        )

    def _part_tasks(self, documents: Records, vocabulary: str = "") -> Iterator[PartTask]:
        """Makes a task of every file of documents."""
        for record in documents:
            for file in record["files"]:
                yield PartTask(self.folder, file["path"], file["text_bytes"], self.settings.cased, vocabulary)

    def _write_documents(self, documents: Records, tokens: Records) -> FileRecord:
        """Writes the table of all documents, in which the number of a document is its row."""

        def batches() -> Iterator[pa.RecordBatch]:
            for source, record in zip(sources_of_parts(documents), tokens, strict=True):
                batch = map_batches(self.folder / file_records(record)[0].path).get_batch(0)
                names = pa.array([source] * batch.num_rows, pa.string())
                yield pa.record_batch([batch["id"], batch["title"], names], schema=DOCUMENTS_SCHEMA)

        return write_batches(self.folder, DOCUMENTS, DOCUMENTS_SCHEMA, batches(), compression="zstd")


def describe(settings: Settings, files: list[SourceFile], given: Vocabulary | None) -> Record:
    """Tells what a run is going to do: decides whether a folder can be continued, and opens the manifest."""
    return {
        "settings": settings.recorded(),
        "sources": [{key: getattr(file, key) for key in SOURCE_KEYS} for file in files],
        "given_vocabulary": given.sha256 if given else None,
    }


def describe_vocabulary(vocabulary: Vocabulary, given: Vocabulary | None) -> Record:
    """Tells of the vocabulary of the shards what the manifest says; `base_size` where a given one was extended."""
    extended = {"base_size": len(given)} if given and len(given) < len(vocabulary) else {}
    return {"size": len(vocabulary), "sha256": vocabulary.sha256, "cased": vocabulary.cased, **extended}


def num_documents(record: Record) -> int:
    """Counts the documents that a task of the first step has read."""
    return sum(file["rows"] for file in record["files"])


def sources_of_parts(documents: Records) -> Iterator[str]:
    """Names the sources of all files of documents, in the order of the corpus."""
    return (record["source"] for record in documents for _ in record["files"])


def corpus_figures(documents: Records, tokens: Records, validation: int, left_out: Problems) -> Record:
    """Sums up the corpus in the numbers that the manifest has of it."""
    by_source: Counter[str] = Counter()
    totals = Counter(dict.fromkeys(("documents", "empty", "sentences", "pieces", "unknown", "text_bytes"), 0))
    more: Counter[str] = Counter()
    for source, record in zip(sources_of_parts(documents), tokens, strict=True):
        books: int = record["books"] if "books" in record else record["documents"]
        by_source[source] += books
        totals.update({**{name: record[name] for name in totals}, "documents": books})
        more.update({name: record[name] for name in ("copies", "over_share") if name in record})
        if "books" in record:  # passages for validation are cut out of the documents
            more["passages"] += record["documents"]
    faults, replaced = [without_place(fault, left_out.names) for fault in left_out.skipped], 0
    for record in documents:
        faults += record["left_out"]
        replaced += record["replaced"]
    return {
        **totals,
        **more,
        "validation_documents": validation,
        "documents_by_source": dict(by_source),
        "skipped": faults,
        "replaced": replaced,
    }
