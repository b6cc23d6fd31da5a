"""A run of shard.py: finds the text, continues an earlier run, goes through the steps and writes the manifest.

A task writes its files, then its record, in the work folder (work.py), which goes when the manifest is written; only
the documents in pieces have a folder of their own, since they stay.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from data_prep import description
from data_prep.choosing import MARKED, SPLIT, is_weighed_by_older
from data_prep.common.capacity import room_for_workers
from data_prep.common.errors import UserError, quote
from data_prep.common.launchers import mpi_size
from data_prep.common.locks import locked
from data_prep.common.workers import Workers
from data_prep.examples.sifting import SHARES_TOO_SMALL
from data_prep.forecast import Amount, Text, describe_disk_need, make_usual_costs, plan_steps, print_forecast
from data_prep.inspection.figures import describe_vocabulary_size
from data_prep.near_copies.finding import FOUND
from data_prep.origins import TAKE, Origins, find_origins, look_for_repeated, make_kept_file
from data_prep.readers import sources
from data_prep.readers.extraction import sample_sources, try_first_records
from data_prep.readers.filters import Filter, make_filters, none_left, write_report
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Problems
from data_prep.running import Runner
from data_prep.seals import FILTERED_REPORT
from data_prep.settings import Settings, join_values, spell_flag
from data_prep.shards import FORMATS, KEPT_FORMAT, MANIFEST, PLAN, Ingredients, Manifest, VocabularyFigures
from data_prep.steps import COUNT, ENCODE, READ, Steps
from data_prep.trial import rehearse
from data_prep.vocabulary.kinds.declaration import USUAL, TokenizerKind, find_kind
from data_prep.vocabulary.kinds.wordpiece import describe_lost_marks
from data_prep.vocabulary.source import find_vocabulary, shorten_name
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import DocumentsRecord, Joined, WorkFolder

LIBRARIES = ("numba", "numpy", "pyarrow", "sentencex", "tokenizers")
NAMED = ("format", "text_field")  # settings that are in the names of tasks
REFUSAL = "another run is at work here ({owner})\nwait for it, or take another --out"
NO_LOCKS = "this file system has no locks; see to it that no other run writes into the folder"


@dataclass
class Pipeline:
    """A run of all the steps into one folder."""

    folder: Path
    settings: Settings
    workers: Workers
    console: Console
    origins: Origins = field(default_factory=Origins)
    """The folders whose documents are taken as they are."""

    @cached_property
    def work(self) -> WorkFolder:
        """The work folder, which is kept until the shards are finished."""
        return WorkFolder(self.folder)

    def run(self) -> Manifest:
        """Does what is left to do and returns the manifest."""
        given = self._given_vocabulary()
        files, left_out = self._find_files()
        plan = self._describe(files, given)
        if (self.folder / MANIFEST).exists():
            return self._finished(plan)
        self.work.refuse_foreign()
        with locked(self.work.path / "lock", str(self.folder), REFUSAL, unknown="unknown") as protected:
            if not protected:
                self._say(f"note: {NO_LOCKS}")
            if (self.folder / MANIFEST).exists():  # since another run has finished
                return self._finished(plan)
            self._check_plan(plan)
            self.workers.share(self.work.path)
            self._note_disk(files)
            return self._run_steps(plan, files, given, left_out)

    def check_beginning(self) -> None:
        """Raises UserError if `run` would do so before its first step; makes nothing."""
        given = self._given_vocabulary()
        plan = self._describe(self._find_files()[0], given)
        if (self.folder / MANIFEST).exists():
            description.Changes(Manifest.read(self.folder), plan).refuse(self.folder)
        else:
            self.work.refuse_foreign()
            self._check_plan(plan, keep=False)

    def print_forecast(self) -> None:
        """Prints what a run will take; makes nothing."""
        given, (files, _) = self._given_vocabulary(), self._find_files()
        text, ranks = Text(files, self.origins), mpi_size()
        workers = ranks if ranks > 1 else self.settings.workers or room_for_workers()[0]
        print_forecast(self.settings, given, text, self.folder, workers, self.console)

    def _say(self, line: str, style: str | None = None) -> None:
        """Prints a line as it stands, however long it is."""
        self.console.print(line, markup=False, soft_wrap=True, style=style)

    def _warn(self, what: str) -> None:
        self._say(f"warning: {what}", "yellow")

    def _given_vocabulary(self) -> Vocabulary | None:
        """Finds the vocabulary that the user names, if any, and takes over whether it keeps case."""
        kind, s = find_kind(self.settings.tokenizer), self.settings
        if not (s.origins or s.vocab):
            self._take_vocabulary(kind, s.cased or kind.is_cased)
            return None
        given = self._take_origins() if s.origins else find_vocabulary(str(s.vocab), s.cased)
        theirs = find_kind(given.kind)
        if s.tokenizer and kind is not theirs:
            raise UserError(
                f"--tokenizer {s.tokenizer}: the vocabulary of --vocab {s.vocab} is {theirs.title}; leave it out"
            )
        if s.extend and not theirs.is_extensible:
            raise UserError(f"--extend: {theirs.title} spells every word with the pieces that it has; leave it out")
        self._take_vocabulary(theirs, given.cased)
        return given

    def _take_vocabulary(self, kind: TokenizerKind, cased: bool) -> None:
        """Takes over the kind and case of the vocabulary; the usual kind is in no manifest, as in older ones."""
        name = kind.vocabulary.kind
        update = {"cased": cased, "tokenizer": None if name == USUAL else name}
        self.settings = self.settings.model_copy(update=update)

    def _find_files(self) -> tuple[list[sources.SourceFile], Problems]:
        """Finds the files to read, and those to leave out; prints both."""
        s, problems = self.settings, Problems(self.settings.errors)
        self._refuse_read("--format", s.formats)
        files = sources.find_files(s.sources, s.formats, self.folder, problems)
        known = [*(file.source for file in self.origins.kept_files), *(file.source for file in files)]
        for flag, named in {"--text-field": s.text_fields, "--language": s.languages}.items():
            self._refuse_read(flag, named)
            sources.check_names(flag, named, [file.source for file in files])
        sources.check_names("--max-share", s.max_shares, known)
        sources.check_names("--weight", s.weights, known)
        if {*known} <= s.max_shares.keys() and sum(s.max_shares.values()) <= 1:
            raise UserError(SHARES_TOO_SMALL)
        for line in (*sources.describe_sources(files, s), *sources.list_left_out(problems.skipped)):
            self._say(line)
        if not (self.folder / MANIFEST).exists():
            filters = make_filters(s)  # so that a wrong list of words or language is reported at once
            try_first_records(files, s.text_field_of, s.errors)
            if not (s.cased or s.tokenizer):
                self._warn_of_lost_marks(files, filters)
        return files, problems

    def _warn_of_lost_marks(self, files: list[sources.SourceFile], filters: Sequence[Filter]) -> None:
        """Warns if lower case strips marks from letters in samples of the sources."""
        s = self.settings
        found = [
            (name, lost) for name, text in sample_sources(files, s, filters) if (lost := describe_lost_marks(text))
        ]
        if found:
            where = found[0][0] + (f" and {len(found) - 1:,} more sources" if len(found) > 1 else "")
            cure = "a cased vocabulary keeps" if s.vocab or s.origins else "--cased keeps"
            self._warn(f"in a sample of {where}, lower case strips {found[0][1]}; {cure} them")

    def _refuse_read(self, flag: str, named: Mapping[str, object]) -> None:
        """Raises UserError where a flag that needs the text names a source whose documents are in pieces already."""
        read = {file.source for file in self.origins.kept_files} - {
            name for name, _ in sources.group_sources(self.settings.sources)
        }
        for name in named.keys() & read:
            raise UserError(
                f"{flag} {name}={named[name]}: needs the text, and the documents of {name} are read already"
            )

    def _finished(self, plan: Ingredients) -> Manifest:
        """Returns the manifest of a folder that an earlier run has finished, if that was to do the same."""
        manifest = Manifest.read(self.folder)
        description.Changes(manifest, plan).refuse(self.folder)
        if not (manifest.figures or self.settings.documents_only):
            raise UserError(
                f"{self.folder}: has documents alone\nmake shards of them: --from {quote(self.folder)} --out ANOTHER"
            )
        own_text = bool(self.settings.docs) and "kept" in manifest.model_fields_set  # since documents are kept
        if own_text and not manifest.kept and not self.settings.no_documents:
            raise UserError(f"{self.folder}: was made with --no-documents\ngive it again, or take another --out")
        self._say_vocabulary(manifest.vocabulary)
        self._say(f"{self.folder} is complete already; nothing to do")
        if manifest.kept and self.settings.no_documents:
            self._say("note: its documents stay, since it was made without --no-documents")
        self.work.delete_other_documents(manifest.kept)
        self.work.remove()
        return manifest

    def _note_disk(self, files: list[sources.SourceFile]) -> None:
        """Warns if the disk likely has too little room for the run."""
        amount = Amount.from_text(self.settings, Text(files, self.origins))
        parts = max(1, round((amount.sources + amount.taken) / sources.LARGEST_BUNDLE))
        if note := describe_disk_need(
            self.folder, plan_steps(self.settings, make_usual_costs(self.settings), amount, parts)
        ):
            self._warn(note)

    def _check_plan(self, plan: Ingredients, keep: bool = True) -> None:
        """Refuses to continue work that was done with other settings; else writes the plan, if `keep`.

        Where files of the text were repaired, added or taken away, only what comes of them is done anew.
        """
        if (self.folder / PLAN).exists() and self.work.list_steps():  # then nothing but the same is continued
            before = self.work.read_plan()
            theirs, ours = before.settings.as_json(), plan.settings.as_json()
            read_anew = [spell_flag(name) for name in NAMED if theirs[name] != ours[name]]
            taken = {name: ours[name] for name in NAMED}
            if theirs["errors"] == "fail":  # what was read without a fault is the same under any policy
                taken["errors"] = ours["errors"]
            before = before.model_copy(update={"settings": before.settings.model_copy(update=taken)})
            changes = description.Changes(before, plan)
            if changes.list_settings():
                changes.refuse(self.folder)
            if self.work.is_finished(SPLIT) and (gone := changes.list_missing()):
                raise UserError(
                    f"{self.folder}: {len(gone)} of the files that it was begun with are gone, such as {gone[0]}\n"
                    "bring them back, or start anew in another --out: all examples would be others without them"
                )
            if not keep:
                return
            self.console.print(f"continuing in {self.folder}", markup=False)
            names = changes.list_sources()
            moved = [one.folder for one in plan.origins if one.folder not in {old.folder for old in before.origins}]
            drawn = ["how --weight draws"] if is_weighed_by_older(self.work) else []
            lost = {task for task, _, record in self.work.journal(TAKE.name, TAKE.kind).read() if record.lost}
            again = self.origins.find_files_to_take_again(self.folder, self.settings.errors, lost)
            if names is not None or read_anew or moved or again or drawn:
                self._take_changes([*(names or []), *read_anew, *moved, *again, *drawn])
        if keep:
            self.work.write_plan(plan)

    def _take_changes(self, names: list[str]) -> None:
        """Goes back to the first step, whose tasks keep what they read of files that are as they were."""
        others = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        change = f"changed since the run began: {names[0]}{others}" if names else "the order of the files changed"
        self.console.print(f"{change}; what comes of the other files is kept as far as it can be", markup=False)
        kept = (READ.name, COUNT.name, ENCODE.name)
        self.work.reopen(*kept)
        self.work.undo(MARKED, FOUND, SPLIT, *(step for step in self.work.list_steps() if step not in kept))
        self.work.remove_shards(self.settings.lengths)

    def _run_steps(
        self, plan: Ingredients, files: list[sources.SourceFile], given: Vocabulary | None, left_out: Problems
    ) -> Manifest:
        """Runs the steps in their order and writes the manifest, which makes the folder a finished one."""
        s, work, bundles = self.settings, self.work, sources.make_bundles(files)
        # every task has the settings, in which the names of files may be many
        lean = s.model_copy(update={"docs": (), "origins": ()})
        steps = Steps(Runner(work, self.workers, self.console), lean)
        documents = steps.read(bundles)
        self._warn_of_changed(files)
        self._refuse_barren(bundles, documents)
        self._refuse_emptied(documents)
        taken = steps.take(self.origins)
        lost = [record.lost for record in taken if record.lost]
        for line in sources.list_left_out([*lost, *(fault for record in documents for fault in record.skipped)]):
            self._say(line)
        said = rehearse(s, len(given) if given else s.vocab_size, work.path, self.console)
        vocabulary = steps.make_vocabulary(documents, given)
        known = [manifest.vocabulary for manifest in self.origins.manifests]
        figures = known[0] if known else description.describe_vocabulary(vocabulary, given)
        self._say_vocabulary(figures)
        self._warn_of_masks(vocabulary)
        rehearse(s, len(vocabulary), work.path, self.console, said)  # fewer pieces may have a smaller type
        cut = steps.cut_documents(documents, vocabulary)
        tokens = Joined((taken, cut))
        made = steps.keep(tokens, vocabulary) if s.documents_only else steps.make_shards(tokens, vocabulary)
        tables = [*made.tables, *([write_report(self.folder, documents)] if steps.filters and bundles else [])]
        faults = [*(origin.faults for origin in self.origins.folders), description.collect_faults(documents, left_out)]
        manifest = Manifest(
            **dict(plan),
            format=FORMATS[s.pairs == "full-sentences"],
            corpus=description.sum_corpus(made.chosen, faults, lost),
            vocabulary=figures,
            vocabulary_source=self._vocabulary_source(),
            files=tables,
            kept=[] if s.no_documents else [make_kept_file(record) for record in cut],
            kept_format=KEPT_FORMAT,
            sets=made.figures,
            bytes=sum(file.size for file in made.files),
            fingerprint="",  # which `write` makes
            versions={"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        )
        manifest.write(self.folder)
        work.delete_other_documents(manifest.kept)  # a start that finds the manifest does the rest
        work.remove()
        return manifest

    def _warn_of_changed(self, files: list[sources.SourceFile]) -> None:
        """Warns where files changed while they were read, since the manifest has the sizes and keys from before."""
        if changed := sources.find_changed(files):
            others = f" and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            what = f"{changed[0]}{others} changed while it was read: the shards may not have what the manifest says"
            self._warn(f"{what}; once nobody writes to it, start anew with another --out")

    def _refuse_barren(self, bundles: list[sources.Bundle], records: Iterable[DocumentsRecord]) -> None:
        """Raises UserError where all files of a source that have one format have no document in them.

        It is likely read as the wrong format. Where the user wants what cannot be read left out, and the source has
        other documents, it warns instead.
        """
        found: Counter[tuple[str, str]] = Counter()
        for bundle, record in zip(bundles, records, strict=True):
            found[bundle.source, bundle.format] += record.documents + record.num_filtered
        for source, format in [kind for kind, count in found.items() if not count]:
            name, fault = quote(source), f"no document in {source}, read as {format}"
            has_fields = list_readers()[format].has_fields
            field = f", or --text-field {name}=FIELD for the field with the text" if has_fields else ""
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
            self._warn(f"the filters leave no document of {emptied[0]}{others}; {FILTERED_REPORT} shows some")

    def _say_vocabulary(self, vocabulary: VocabularyFigures) -> None:
        """Prints the size of the vocabulary, also if an earlier run made it."""
        s, folders = self.settings, self.origins.folders
        given, extend = (str(folders[0].folder), 0) if folders else (s.vocab, s.extend)
        self._say(describe_vocabulary_size(s.vocab_size, given, extend, vocabulary))

    def _warn_of_masks(self, vocabulary: Vocabulary) -> None:
        """Warns if the vocabulary has no piece of its own for masks."""
        if vocabulary.special.mask == vocabulary.special.sep:
            mask = vocabulary.special_pieces.mask
            self._warn(f"{mask} stands for masks too: these shards are for objectives without")

    def _vocabulary_source(self) -> str | None:
        """Names the origin of the vocabulary for the manifest; None if it was trained from this text."""
        if not self.origins.folders:
            return shorten_name(self.settings.vocab) if self.settings.vocab else None
        if len(self.origins.folders) == 1 and not self.settings.docs:  # whose text then made the shards
            return self.origins.manifests[0].vocabulary_source
        return shorten_name(str(self.origins.folders[0].folder))

    def _describe(self, files: list[sources.SourceFile], given: Vocabulary | None) -> Ingredients:
        """Makes the plan of the run; prints which texts are there twice."""
        plan = description.describe(self.settings, files, given)
        if not self.origins.folders:
            return plan
        groups = [*((str(origin.folder), origin.sources) for origin in self.origins.folders), ("--docs", plan.sources)]
        for note in look_for_repeated(groups):
            self._say(f"note: {note}")
        return description.describe_with_origins(plan, self.origins, self.folder)

    def _take_origins(self) -> Vocabulary:
        """Finds the folders of --from and the vocabulary of their documents; prints their counts."""
        self.origins = find_origins(join_values(self.settings.origins))
        for origin in self.origins.folders:
            if self.folder.resolve().is_relative_to(origin.folder.resolve()):
                raise UserError(f"--from {origin.folder}: shards of its documents need an --out outside of it")
            kept = origin.manifest.kept
            counts = f"{sum(file.rows for file in kept):,} documents, {sum(file.pieces for file in kept):,} pieces"
            self._say(f"{origin.folder}: {counts}, as they are")
        for difference in self.origins.find_differences():
            self._say(f"note: {difference}; the manifest tells those of {self.origins.folders[0].folder}")
        return self.origins.load_vocabulary()
