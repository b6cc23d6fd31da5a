"""A run of shard.py: what is read, whether an earlier run is continued, the steps, and the manifest of what they made.

A task writes its files, then its record, all in the work folder (work.py), which goes when the manifest is written.
"""

from __future__ import annotations

import platform
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from data_prep.common.capacity import num_cores
from data_prep.common.errors import UserError
from data_prep.common.locks import locked
from data_prep.common.workers import Workers
from data_prep.examples.sifting import SHARES_TOO_SMALL
from data_prep.forecast import disk_note, expanded, forecast, steps_of, usual_costs
from data_prep.inspection.figures import vocabulary_line
from data_prep.readers.extraction import FIELDED, try_first_records
from data_prep.readers.reader import Problems, without_place
from data_prep.readers.sources import LARGEST_BUNDLE, Bundle, SourceFile, check_names, find_files, make_bundles
from data_prep.readers.summary import left_out_lines, source_lines
from data_prep.running import Runner
from data_prep.settings import Settings
from data_prep.shards import (
    FORMAT,
    MANIFEST,
    CorpusFigures,
    Ingredients,
    Manifest,
    RecordedSettings,
    SourceRecord,
    VocabularyFigures,
    length_folder,
)
from data_prep.steps import COUNT, ENCODE, MARKED, READ, SPLIT, Made, Steps, sources_of_parts
from data_prep.trial import rehearse
from data_prep.vocabulary.source import find_vocabulary, short_name
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import (
    DocumentsRecord,
    WorkFolder,
    changed_settings,
    changed_sources,
    missing_sources,
    refuse_changes,
    refuse_foreign,
)

LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")
COUNTED = ("documents", "empty", "sentences", "pieces", "unknown", "text_bytes", "copies", "over_share")
"""What is summed up over the files of token documents."""
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
        """What is kept until the shards are finished, by this run and by an earlier one that it goes on from."""
        return WorkFolder(self.folder)

    def run(self) -> Manifest:
        """Does what is left to do and returns the manifest."""
        given = self._given_vocabulary()
        files, left_out = self._find_files()
        plan = describe(self.settings, files, given)
        if (self.folder / MANIFEST).exists():
            return self._finished(plan)
        refuse_foreign(self.work)
        with locked(self.work.path / "lock", str(self.folder), REFUSAL, unknown="unknown") as protected:
            if not protected:
                self._say(f"note: {NO_LOCKS}")
            self._check_plan(plan)
            self.workers.share(self.work.path)
            self._note_disk(files)
            return self._run_steps(plan, make_bundles(files), given, left_out)

    def forecast(self) -> None:
        """Says what a run will take; makes nothing."""
        given, (files, _) = self._given_vocabulary(), self._find_files()
        forecast(self.settings, given, files, self.folder, self.settings.workers or num_cores(), self.console)

    def _say(self, line: str, style: str | None = None) -> None:
        """Prints a line as it stands, however long it is."""
        self.console.print(line, markup=False, soft_wrap=True, style=style)

    def _warn(self, what: str) -> None:
        self._say(f"warning: {what}", "yellow")

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
            self._say(line)
        if not (self.folder / MANIFEST).exists():
            try_first_records(files, s.text_field_of, s.errors)
        return files, problems

    def _finished(self, plan: Ingredients) -> Manifest:
        """Returns the manifest of a folder that an earlier run has finished, if that was to do the same."""
        manifest = Manifest.read(self.folder)
        refuse_changes(self.folder, manifest, plan)
        self._say_vocabulary(manifest.vocabulary)
        self.console.print(f"{self.folder} is complete already; nothing to do", markup=False)
        self.work.remove()
        return manifest

    def _note_disk(self, files: list[SourceFile]) -> None:
        """Says so where the disk likely has too little room for the run."""
        size = expanded(files)
        parts = max(1, round(size / LARGEST_BUNDLE))
        if note := disk_note(self.folder, steps_of(self.settings, usual_costs(self.settings), size, parts)):
            self._warn(note)

    def _check_plan(self, plan: Ingredients) -> None:
        """Keeps the plan; refuses to go on from what was done with other settings.

        Where files of the text were repaired, added or taken away, only what comes of them is done anew.
        """
        if self.work.is_begun():
            before = self.work.read_plan()
            theirs, ours = before.settings.as_json(), plan.settings.as_json()
            read_anew = [f"--{name}" for name in READING if theirs[name] != ours[name]]
            taken = {name: ours[name] for name in READING}
            if theirs["errors"] == "fail":  # what was read without a fault is the same under any policy
                taken["errors"] = ours["errors"]
            before = before.model_copy(update={"settings": before.settings.model_copy(update=taken)})
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
        kept = (READ.name, COUNT.name, ENCODE.name)
        self.work.reopen(*kept)
        self.work.undo(MARKED, SPLIT, *(step for step in self.work.steps() if step not in kept))
        for length in self.settings.lengths:
            shutil.rmtree(self.folder / length_folder(length), ignore_errors=True)

    def _run_steps(
        self, plan: Ingredients, bundles: list[Bundle], given: Vocabulary | None, left_out: Problems
    ) -> Manifest:
        """Runs the steps in their order and writes the manifest, which makes the folder a finished one."""
        s, work = self.settings, self.work
        # every task has the settings, in which the names of files may be many
        steps = Steps(Runner(work, self.workers, self.console), s.model_copy(update={"docs": ()}))
        documents = steps.read(bundles)
        self._refuse_barren(bundles, documents)
        for line in left_out_lines([fault for record in documents for fault in record.skipped]):
            self._say(line)
        said = rehearse(s, len(given) if given else s.vocab_size, work.path, self.console)
        vocabulary = steps.make_vocabulary(documents, given)
        figures = describe_vocabulary(vocabulary, given)
        self._say_vocabulary(figures)
        rehearse(s, len(vocabulary), work.path, self.console, said)  # fewer pieces may have a smaller type
        made = steps.make_shards(documents, vocabulary)
        shards = [file for one in made.figures for file in one.shards]
        manifest = Manifest(
            **dict(plan),
            format=FORMAT,
            corpus=corpus_figures(documents, made, left_out),
            vocabulary=figures,
            vocabulary_source=short_name(s.vocab) if s.vocab else None,
            files=made.tables,
            sets=made.figures,
            bytes=sum(file.size for file in (*made.tables, *shards)),
            versions={"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        )
        manifest.write(self.folder)
        work.remove()
        return manifest

    def _refuse_barren(self, bundles: list[Bundle], records: Iterable[DocumentsRecord]) -> None:
        """Raises UserError where all files of a source that have one format have no document in them.

        It is likely read as the wrong format. Where the user wants what cannot be read left out, and the source has
        other documents, that is said instead.
        """
        found: Counter[tuple[str, str]] = Counter()
        for bundle, record in zip(bundles, records, strict=True):
            found[bundle.source, bundle.format] += record.documents
        for source, format in [kind for kind, count in found.items() if not count]:
            name, fault = shlex.quote(source), f"no document in {source}, read as {format}"
            field = f", or --text-field {name}=FIELD for the field with the text" if format in FIELDED else ""
            cure = f"say what the files are with --format {name}=FORMAT{field}"
            if self.settings.errors == "skip" and any(found[kind] for kind in found if kind[0] == source):
                self._warn(f"{fault}: all of that is left out; where it has text, {cure}")
                continue
            pairs = zip(bundles, records, strict=True)
            own = (record for bundle, record in pairs if (bundle.source, bundle.format) == (source, format))
            faults = [f"  left out: {fault}" for record in own for fault in record.skipped][:3]
            if not found.total():
                self.work.remove()
            raise UserError("\n".join([fault, *faults, f"{cure}; or leave them out"]))

    def _say_vocabulary(self, vocabulary: VocabularyFigures) -> None:
        """Says how large the vocabulary is, in every run, where it was made earlier too."""
        s = self.settings
        self._say(vocabulary_line(s.vocab_size, s.vocab, s.extend, vocabulary))


def describe(settings: Settings, files: list[SourceFile], given: Vocabulary | None) -> Ingredients:
    """Tells what a run is going to do."""
    return Ingredients(
        settings=RecordedSettings(**settings.recorded()),
        sources=[SourceRecord(file.source, file.name, file.size, file.format, file.content) for file in files],
        given_vocabulary=given.sha256 if given else None,
    )


def describe_vocabulary(vocabulary: Vocabulary, given: Vocabulary | None) -> VocabularyFigures:
    """Tells of the vocabulary of the shards what the manifest says; `base_size` where a given one was extended."""
    extended = {"base_size": len(given)} if given and len(given) < len(vocabulary) else {}
    return VocabularyFigures(size=len(vocabulary), sha256=vocabulary.sha256, cased=vocabulary.cased, **extended)


def corpus_figures(documents: Iterable[DocumentsRecord], made: Made, left_out: Problems) -> CorpusFigures:
    """Sums up the corpus in the numbers that the manifest has of it."""
    by_source: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for source, record in zip(sources_of_parts(documents), made.chosen, strict=True):
        counts = {name: getattr(record, name) for name in COUNTED}
        if record.books is not None:  # passages for validation are cut out of the documents
            counts |= {"documents": record.books, "passages": record.documents}
        totals.update({name: count for name, count in counts.items() if count is not None})
        by_source[source] += counts["documents"]
    faults = [without_place(fault, left_out.names) for fault in left_out.skipped]
    return CorpusFigures(
        **totals,
        validation_documents=made.num_held_out,
        documents_by_source=by_source,
        skipped=[*faults, *(fault for record in documents for fault in record.left_out)],
        replaced=sum(record.replaced for record in documents),
    )
