"""The inputs of a run: its text, its vocabulary and the documents of other folders, found before its first step.

The plan of a run names them and its settings; it is compared with that of an earlier run into the same folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.examples.sifting import SHARES_TOO_SMALL
from data_prep.origins import Origins, find_origins, find_repeated
from data_prep.readers import sources
from data_prep.readers.extraction import sample_sources, try_first_records
from data_prep.readers.filters import Filter, describe_words, make_filters
from data_prep.readers.reader import Problems
from data_prep.seals import UNUSED, name_language
from data_prep.settings import Fact, Settings, join_values, list_by, spell_flag
from data_prep.shards import KEPT_FORMATS, MANIFEST, Ingredients, RecordedSettings, SourceRecord
from data_prep.vocabulary.kinds.declaration import USUAL, find_kind
from data_prep.vocabulary.kinds.wordpiece import describe_lost_marks
from data_prep.vocabulary.source import find_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import spell_value


@dataclass(frozen=True)
class Inputs:
    """What a run reads, and the settings that it has once its vocabulary is known."""

    folder: Path
    """The output folder."""
    settings: Settings
    """The settings, with the kind and the case of the vocabulary."""
    origins: Origins
    """The folders whose documents are taken as they are."""
    vocabulary: Vocabulary | None
    """The vocabulary that the user names, if any."""
    files: list[sources.SourceFile]
    left_out: Problems
    """The files that cannot be read, where the user wants them left out."""
    plan: Ingredients
    """The settings and sources, as the manifest will have them."""


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Prints a line as it stands, however long it is."""
    console.print(line, markup=False, soft_wrap=True, style=style)


def print_warning(console: Console, what: str) -> None:
    """Prints a warning, however long it is."""
    print_line(console, f"warning: {what}", "yellow")


def find_inputs(folder: Path, settings: Settings, console: Console) -> Inputs:
    """Finds the inputs of a run into a folder, and prints them; raises UserError where they do not fit together."""
    origins = find_origins(join_values(settings.origins))
    _print_origins(origins, folder, console)
    given = origins.load_vocabulary() if origins.folders else None
    if settings.vocab and not given:
        given = find_vocabulary(str(settings.vocab), settings.cased)
    settings = _take_vocabulary(settings, given)
    files, left_out = _find_files(folder, settings, origins, console)
    if not (folder / MANIFEST).exists():
        filters = make_filters(settings)  # so that a wrong list of words or language is reported at once
        try_first_records(files, settings.text_field_of, settings.errors)
        if not (settings.cased or settings.tokenizer):
            _warn_of_lost_marks(files, settings, filters, console)
    plan = describe(settings, files, given)
    if origins.folders:
        groups = [*((str(origin.folder), origin.sources) for origin in origins.folders), ("--docs", plan.sources)]
        for note in find_repeated(groups):
            print_line(console, f"note: {note}")
        plan = describe_with_origins(plan, origins, folder)
    return Inputs(folder, settings, origins, given, files, left_out, plan)


def _print_origins(origins: Origins, folder: Path, console: Console) -> None:
    """Prints how much the folders of --from have; raises UserError where the output folder is in one of them."""
    for origin in origins.folders:
        if folder.resolve().is_relative_to(origin.folder.resolve()):
            raise UserError(f"--from {origin.folder}: shards of its documents need an --out outside of it")
        kept = origin.manifest.kept
        counts = f"{sum(file.rows for file in kept):,} documents, {sum(file.pieces for file in kept):,} pieces"
        print_line(console, f"{origin.folder}: {counts}, as they are")
        if kept and origin.manifest.kept_format < KEPT_FORMATS[-1]:
            older = "cut by the rules of an earlier version: some ends of sentences and long words are other ones"
            print_line(console, f"{origin.folder}: {older}; --docs with its text cuts it anew")


def _take_vocabulary(s: Settings, given: Vocabulary | None) -> Settings:
    """Takes over the kind and case of the vocabulary; the usual kind is in no manifest, as in older ones."""
    asked = find_kind(s.tokenizer)
    kind = find_kind(given.kind) if given else asked
    if s.tokenizer and kind is not asked:
        raise UserError(f"--tokenizer {s.tokenizer}: the vocabulary of --vocab {s.vocab} is {kind.title}; leave it out")
    if given and s.extend and not kind.is_extensible:
        raise UserError(f"--extend: {kind.title} spells every word with the pieces that it has; leave it out")
    name, cased = kind.vocabulary.kind, given.cased if given else s.cased or kind.is_cased
    return s.model_copy(update={"cased": cased, "tokenizer": None if name == USUAL else name})


def _find_files(
    folder: Path, s: Settings, origins: Origins, console: Console
) -> tuple[list[sources.SourceFile], Problems]:
    """Finds the files to read, and those to leave out; prints both."""
    problems = Problems(s.errors)
    files = sources.find_files(s.sources, s.formats, folder, problems)
    read = [file.source for file in files]
    known = [*(file.source for file in origins.kept_files), *read]
    for flag, named in {"--text-field": s.text_fields, "--language": s.languages}.items():
        sources.check_names(flag, named, read)
    for flag, shares in {"--max-share": s.max_shares, "--weight": s.weights}.items():
        sources.check_names(flag, shares, known)
    if {*known} <= s.max_shares.keys() and sum(s.max_shares.values()) <= 1:
        raise UserError(SHARES_TOO_SMALL)
    for line in (*sources.describe_sources(files, s), *sources.list_left_out(problems.skipped)):
        print_line(console, line)
    return files, problems


def _warn_of_lost_marks(
    files: list[sources.SourceFile], s: Settings, filters: Sequence[Filter], console: Console
) -> None:
    """Warns if lower case strips marks from letters in samples of the sources."""
    found = [(name, lost) for name, text in sample_sources(files, s, filters) if (lost := describe_lost_marks(text))]
    if found:
        where = found[0][0] + (f" and {len(found) - 1:,} more sources" if len(found) > 1 else "")
        cure = "a cased vocabulary keeps" if s.vocab or s.origins else "--cased keeps"
        print_warning(console, f"in a sample of {where}, lower case strips {found[0][1]}; {cure} them")


def describe(settings: Settings, files: list[sources.SourceFile], given: Vocabulary | None) -> Ingredients:
    """Makes the plan of a run: its settings and its sources."""
    recorded = settings.record_values() | {"without_words": describe_words(settings.without_words)}
    return Ingredients(
        settings=RecordedSettings(**recorded),
        sources=[SourceRecord(file.source, file.name, file.size, file.format, file.content) for file in files],
        given_vocabulary=given.sha256 if given else None,
    )


def describe_with_origins(plan: Ingredients, origins: Origins, out: Path) -> Ingredients:
    """Adds the settings and sources of other folders to a plan, as if it had read their text itself."""
    alone = len(origins.folders) == 1 and not plan.sources  # the text of that folder then made the shards
    theirs = origins.read_settings()
    if plan.sources:
        theirs = {name: theirs[name] for name in list_by(Fact.CUTS) if name in theirs}
    for name in () if alone else list_by(Fact.BY_SOURCE):
        said = plan.settings.as_json()[name] if plan.sources else None
        ours = said if isinstance(said, dict) else {"": said} if said is not None else {}
        named = {source: one for source, one in origins.read_by_source(name).items() if one != ours.get("")} | ours
        theirs[name] = named if named.keys() - {""} else named.get("")
    changed: dict[str, Any] = {
        "settings": plan.settings.model_copy(update=theirs),
        "sources": [*(file for origin in origins.folders for file in origin.sources), *plan.sources],
        "origins": [origin.record(out) for origin in origins.folders],
    }
    if alone:
        changed["given_vocabulary"] = origins.manifests[0].given_vocabulary
    return plan.model_copy(update=changed)


@dataclass(frozen=True)
class Changes:
    """Compares the settings and sources that a folder was begun with to those of now."""

    before: Ingredients
    now: Ingredients

    def refuse(self, folder: Path) -> None:
        """Raises UserError if a setting or source of the folder differs."""
        changes, names = self.list_settings(), self.list_sources()
        if names is not None:
            changes.append(f"  --docs: {len(names)} files differ" + (f", such as {names[0]}" if names else ""))
        if changes:
            raise UserError(
                f"{folder} was made with other settings:\n" + "\n".join(changes) + "\n"
                "give the same settings to continue, another --out, or remove the folder"
            )

    def list_settings(self) -> list[str]:
        """Lists the settings that differ."""
        theirs, ours = ({**UNUSED, **plan.settings.as_json()} for plan in (self.before, self.now))
        changes = [
            f"  {spell_flag(name)} was {spell_value(theirs.get(name))}, now {spell_value(ours[name])}"
            for name, value in name_language(ours).items()
            if name_language(theirs).get(name) != value
        ]
        if self.before.given_vocabulary != self.now.given_vocabulary:
            changes.append("  --vocab: another vocabulary")
        if [origin.key for origin in self.before.origins] != [origin.key for origin in self.now.origins]:
            changes.append("  --from: other documents")
        return changes

    def list_sources(self) -> list[str] | None:
        """Names the files that were added, removed or changed; None if nothing differs, an empty list if only the order
        does."""
        if self.before.sources == self.now.sources:
            return None
        return sorted({file.name for file in {*self.before.sources} ^ {*self.now.sources}})

    def list_missing(self) -> list[str]:
        """Names the files that are gone."""
        old, new = ({(file.source, file.name) for file in plan.sources} for plan in (self.before, self.now))
        return sorted(name for _, name in old - new)
