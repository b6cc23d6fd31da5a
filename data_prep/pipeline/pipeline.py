"""A run of shard.py: continues an earlier one, goes through the steps and writes the manifest.

A task writes its files, then its record, in the work folder (work.py), which goes when the manifest is written; only
the documents in pieces have a folder of their own, since they stay.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.common.errors import UserError, quote
from data_prep.common.locks import locked
from data_prep.common.workers import Workers
from data_prep.inspection.figures import describe_vocabulary_size
from data_prep.near_copies.finding import FOUND, GROUPED
from data_prep.origins import TAKE, Faults, describe_damage, make_kept_file, sum_counts, sum_filtered
from data_prep.pipeline.choosing import MARKED, SPLIT, Chosen
from data_prep.pipeline.forecast import rehearse
from data_prep.pipeline.inputs import Changes, Inputs, print_line, print_warning
from data_prep.pipeline.steps import COUNT, ENCODE, READ, Steps
from data_prep.readers import sources
from data_prep.readers.filters import add_up, none_left, write_report
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Problems, replace_path
from data_prep.running import Runner
from data_prep.seals import FILTERED_REPORT
from data_prep.settings import Fact, Settings, list_by, spell_flag
from data_prep.shards import (
    FORMATS,
    KEPT_FORMATS,
    MANIFEST,
    PLAN,
    CorpusFigures,
    Manifest,
    TextCounts,
    VocabularyFigures,
)
from data_prep.vocabulary.source import shorten_name
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import DocumentsRecord, Joined, WorkFolder

LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")
REFUSAL = "another run is at work here ({owner})\nwait for it, or take another --out"
COUNTED = ("documents", *TextCounts.model_fields)
"""Counts that are added up over the files of token documents."""
NO_LOCKS = "note: this file system has no locks; see to it that no other run writes into the folder"


@dataclass(frozen=True)
class Pipeline:
    """A run of all the steps into one folder."""

    inputs: Inputs
    workers: Workers
    console: Console

    @property
    def folder(self) -> Path:
        """Names the output folder."""
        return self.inputs.folder

    @property
    def settings(self) -> Settings:
        """Returns the settings of the run."""
        return self.inputs.settings

    @cached_property
    def work(self) -> WorkFolder:
        """The work folder, which is kept until the shards are finished."""
        return WorkFolder(self.folder)

    @cached_property
    def runner(self) -> Runner:
        """Runs the steps, and measures what each takes."""
        return Runner(self.work, self.workers, self.console)

    def run(self) -> Manifest:
        """Does what is left to do and returns the manifest."""
        if (self.folder / MANIFEST).exists():
            return self._return_finished()
        self.work.refuse_foreign()
        with locked(self.work.path / "lock", str(self.folder), REFUSAL) as protected:
            if not protected:
                print_line(self.console, NO_LOCKS)
            if (self.folder / MANIFEST).exists():  # since another run has finished
                return self._return_finished()
            changed = self._find_changes()
            if changed is not None:
                print_line(self.console, f"continuing in {self.folder}")
            if changed:
                self._take_changes(changed)
            self.work.write_plan(self.inputs.plan)
            self.workers.share(self.work.path)
            return self._run_steps()

    def _return_finished(self) -> Manifest:
        """Returns the manifest of a folder that an earlier run has finished, if that was to do the same."""
        manifest = Manifest.read(self.folder)
        Changes(manifest, self.inputs.plan).refuse(self.folder)
        if not self.settings.documents_only:
            manifest.require_examples(self.folder)
        self._print_vocabulary(manifest.vocabulary)
        print_line(self.console, f"{self.folder} is complete already; nothing to do")
        self.work.delete_other_documents(manifest.kept)
        self.work.remove()
        return manifest

    def _find_changes(self) -> list[str] | None:
        """Lists what changed since the run began, after which only what comes of that is done anew; None if it is new.

        Raises UserError where it was begun with other settings, and then nothing but the same is continued.
        """
        if not ((self.folder / PLAN).exists() and self.work.list_steps()):
            return None
        before, plan = self.work.read_plan(), self.inputs.plan
        theirs, ours = before.settings.as_json(), plan.settings.as_json()
        renaming = list_by(Fact.RENAMES_TASKS)
        may_differ = (*renaming, "errors") if before.settings.errors == "fail" else renaming  # all read alike then
        settings = before.settings.model_copy(update={name: ours[name] for name in may_differ})
        changes = Changes(before.model_copy(update={"settings": settings}), plan)
        if changes.list_settings():
            changes.refuse(self.folder)
        if self.work.is_finished(SPLIT) and (gone := changes.list_missing()):
            raise UserError(
                f"{self.folder}: {len(gone)} of the files that it was begun with are gone, such as {gone[0]}\n"
                "bring them back, or start anew in another --out: all examples would be others without them"
            )
        files = changes.list_sources()
        lost = {task for task, _, record in self.work.journal(TAKE.name, TAKE.kind).read() if record.lost}
        tasks = self.inputs.origins.make_tasks(self.folder, self.settings.errors) if lost else ()
        return [
            *([] if files is None else files or ["the order of the files"]),
            *(spell_flag(name) for name in renaming if theirs.get(name) != ours[name]),
            *sorted({one.folder for one in plan.origins} - {old.folder for old in before.origins}),
            *(task.file.path for task in tasks if task.name in lost and not describe_damage(task)),
        ]

    def _take_changes(self, names: list[str]) -> None:
        """Goes back to the first step, whose tasks keep what they read of files that are as they were."""
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        kept_as_far = "what comes of the other files is kept as far as it can be"
        print_line(self.console, f"changed since the run began: {names[0]}{others}; {kept_as_far}")
        kept = (READ.name, COUNT.name, ENCODE.name)
        self.work.reopen(*kept)
        self.work.undo(MARKED, FOUND, GROUPED, SPLIT, *(step for step in self.work.list_steps() if step not in kept))
        self.work.remove_shards(self.settings.lengths)

    def _run_steps(self) -> Manifest:
        """Runs the steps in their order and writes the manifest, which makes the folder a finished one."""
        s, work, origins, given = self.settings, self.work, self.inputs.origins, self.inputs.vocabulary
        bundles = sources.make_bundles(self.inputs.files)
        # every task has the settings, in which the names of files may be many
        steps = Steps(self.runner, s.model_copy(update={"docs": (), "origins": ()}))
        documents = steps.read(bundles)
        self._warn_of_changed()
        self._refuse_barren(bundles, documents)
        self._refuse_emptied(documents)
        taken = steps.take(origins)
        lost = [record.lost for record in taken if record.lost]
        for line in sources.list_left_out([*lost, *(fault for record in documents for fault in record.skipped)]):
            print_line(self.console, line)
        compiled = rehearse(s, len(given) if given else s.vocab_size, work.path, self.console)
        vocabulary = steps.make_vocabulary(documents, given)
        known = [manifest.vocabulary for manifest in origins.manifests]
        figures = known[0] if known else describe_vocabulary(vocabulary, given)
        self._print_vocabulary(figures)
        self._warn_of_masks(vocabulary)
        rehearse(s, len(vocabulary), work.path, self.console, compiled)  # fewer pieces may have a smaller type
        cut = steps.cut_documents(documents, vocabulary)
        tokens = Joined((taken, cut))
        made = steps.keep(tokens, vocabulary) if s.documents_only else steps.make_shards(tokens, vocabulary)
        tables = [*made.tables, *([write_report(self.folder, documents)] if steps.filters and bundles else [])]
        faults = [*(origin.faults for origin in origins.folders), collect_faults(documents, self.inputs.left_out)]
        manifest = Manifest(
            **dict(self.inputs.plan),
            format=FORMATS[s.pairs == "full-sentences"],
            corpus=sum_corpus(made.chosen, faults, lost),
            vocabulary=figures,
            vocabulary_source=self._name_vocabulary(),
            files=tables,
            kept=[] if s.no_documents else [make_kept_file(record) for record in cut],
            kept_format=KEPT_FORMATS[-1],
            sets=made.figures,
            bytes=sum(file.size for file in (*made.tables, *(file for one in made.figures for file in one.shards))),
            fingerprint="",  # which `write` makes
            versions={"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        )
        manifest.write(self.folder)
        work.delete_other_documents(manifest.kept)  # a start that finds the manifest does the rest
        work.remove()
        return manifest

    def _warn_of_changed(self) -> None:
        """Warns where files changed while they were read, since the manifest has the sizes and keys from before."""
        if changed := sources.find_changed(self.inputs.files):
            others = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            what = f"{changed[0]}{others} changed while it was read: the shards may differ from the manifest"
            print_warning(self.console, f"{what}; once nobody writes to it, start anew with another --out")

    def _refuse_barren(self, bundles: list[sources.Bundle], records: Iterable[DocumentsRecord]) -> None:
        """Raises UserError where all files of a source that have one format have no document in them.

        It is likely read as the wrong format. Where the user wants what cannot be read left out, and the source has
        other documents, it warns instead.
        """
        found: Counter[tuple[str, str]] = Counter()
        faults: dict[tuple[str, str], list[str]] = {}
        for bundle, record in zip(bundles, records, strict=True):
            kind = bundle.source, bundle.format
            found[kind] += record.documents + record.num_filtered
            faults[kind] = [*faults.get(kind, []), *record.skipped][:3]
        for source, format in [kind for kind, count in found.items() if not count]:
            name, fault = quote(source), f"no document in {source}, read as {format}"
            has_fields = list_readers()[format].has_fields
            field = f", or --text-field {name}=FIELD for the field with the text" if has_fields else ""
            cure = f"say what the files are with --format {name}=FORMAT{field}"
            if self.settings.errors == "skip" and any(found[kind] for kind in found if kind[0] == source):
                print_warning(self.console, f"{fault}: all of that is left out; where it has text, {cure}")
                continue
            if not found.total():
                self.work.remove()
            skipped = [f"  left out: {one}" for one in faults[source, format]]
            raise UserError("\n".join([fault, *skipped, f"{cure}; or leave them out"]))

    def _refuse_emptied(self, records: Iterable[DocumentsRecord]) -> None:
        """Raises UserError where filters leave no document at all; warns where they leave none of a source."""
        left: Counter[str] = Counter()
        for record in records:
            left[record.source] += record.documents
        emptied = [source for source, count in left.items() if not count]
        if left and not left.total():
            fault = none_left(records, self.settings)  # which reads what the work folder has
            self.work.remove()
            raise UserError(fault)
        if emptied:
            others = f" and {len(emptied) - 1:,} more sources" if len(emptied) > 1 else ""
            what = f"the filters leave no document of {emptied[0]}{others}; {FILTERED_REPORT} shows some"
            print_warning(self.console, what)

    def _print_vocabulary(self, vocabulary: VocabularyFigures) -> None:
        """Prints the size of the vocabulary, also if an earlier run made it."""
        s, folders = self.settings, self.inputs.origins.folders
        given, extend = (str(folders[0].folder), 0) if folders else (s.vocab, s.extend)
        print_line(self.console, describe_vocabulary_size(s.vocab_size, given, extend, vocabulary))

    def _warn_of_masks(self, vocabulary: Vocabulary) -> None:
        """Warns if the vocabulary has no piece of its own for masks."""
        if vocabulary.special.mask == vocabulary.special.sep:
            mask = vocabulary.special_pieces.mask
            print_warning(self.console, f"{mask} stands for masks too: these shards are for objectives without")

    def _name_vocabulary(self) -> str | None:
        """Names the origin of the vocabulary for the manifest; None if it was trained from this text."""
        folders, s = self.inputs.origins.folders, self.settings
        if len(folders) == 1 and not s.docs:  # whose text then made the shards
            return folders[0].manifest.vocabulary_source
        source = str(folders[0].folder) if folders else s.vocab
        return shorten_name(source) if source else None


def describe_vocabulary(vocabulary: Vocabulary, given: Vocabulary | None) -> VocabularyFigures:
    """Makes the record of a vocabulary; `base_size` is there if a given vocabulary was extended."""
    extended = {"base_size": len(given)} if given and len(given) < len(vocabulary) else {}
    return VocabularyFigures(size=len(vocabulary), sha256=vocabulary.sha256, cased=vocabulary.cased, **extended)


def collect_faults(documents: Iterable[DocumentsRecord], left_out: Problems) -> Faults:
    """Lists what could not be read, files first, without paths of this machine; counts replaced and filtered."""
    files = [replace_path(fault, left_out.names) for fault in left_out.skipped]
    skipped = [*files, *(fault for record in documents for fault in record.left_out)]
    filtered = {name: total.number for name, total in add_up(documents).items()}
    empty = sum(record.empty for record in documents)
    no_text = sum_counts([*(record.no_text for record in documents), left_out.no_text])
    return Faults(skipped, sum(record.replaced for record in documents), filtered or None, empty, no_text)


def sum_corpus(chosen: Chosen, faults: Iterable[Faults], lost: list[str]) -> CorpusFigures:
    """Adds up the figures of the corpus; `lost` names damaged files of documents of other folders."""
    by_source: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for record in chosen.once:
        counts = {name: getattr(record, name) for name in COUNTED}
        if record.books is not None:  # passages for validation are cut out of the documents
            counts |= {"documents": record.books, "passages": record.documents}
        totals.update({name: count for name, count in counts.items() if count is not None})
        by_source[record.source] += counts["documents"]
    if chosen.parts is not chosen.once:
        totals["weighed"] = sum(record.documents for record in chosen.parts)
    if any(record.unknown and not record.characters for record in chosen.once):
        totals["characters"] = totals["unknown_characters"] = 0  # documents of an earlier version do not count them
    faults = list(faults)
    totals["empty"] += sum(one.empty for one in faults)
    if lost:
        totals["lost"] = len(lost)
    counted: dict[str, Any] = {**totals}
    if any(one.filtered is not None for one in faults):
        counted["filtered"] = sum_filtered(faults)
    if no_text := sum_counts(one.no_text for one in faults):
        counted["no_text"] = no_text
    return CorpusFigures(
        **counted,
        validation_documents=chosen.num_held_out,
        documents_by_source=by_source,
        skipped=[*(fault for one in faults for fault in one.skipped), *lost],
        replaced=sum(one.replaced for one in faults),
    )
