"""Folders of documents in pieces, which --from names to make other shards of them.

A folder that was made of the documents of others has none of its own, or those of new text beside them: theirs come
first then, in the same order as when it was made.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.common.errors import DamageError, UserError, quote
from data_prep.common.files import absence, sha256
from data_prep.running import Step
from data_prep.seals import require_seal
from data_prep.settings import NO_FORMULAS, Errors, Fact, list_by
from data_prep.shards import KEPT_FORMATS, MANIFEST, KeptFile, Manifest, OriginRecord, SourceRecord
from data_prep.vocabulary.kinds.declaration import load_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from data_prep.work import TokensRecord

COUNTS = ("empty", "sentences", "pieces", "unknown", "text_bytes", "characters", "unknown_characters")
"""Counts of a file that both TokensRecord and KeptFile have."""


class Faults(NamedTuple):
    """Text that could not be read, and documents that filters left out."""

    skipped: list[str]
    replaced: int
    """Documents in which bad characters were replaced."""
    filtered: dict[str, int] | None = None
    """Documents that each filter left out, where there were filters."""
    empty: int = 0
    """Documents that had no text when they were read."""
    no_text: Mapping[str, int] = {}
    """Numbers of pages, lines and files that their formats left out."""


def sum_filtered(faults: Iterable[Faults | OriginRecord]) -> dict[str, int]:
    """Adds up what each filter left out of several texts."""
    return sum_counts(one.filtered or {} for one in faults)


def sum_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Adds up numbers that have names."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


@dataclass(frozen=True)
class Origin:
    """A finished folder that has documents in pieces.

    If it was made of the documents of others too, its manifest lists those first.
    """

    folder: Path
    manifest: Manifest

    @property
    def sources(self) -> list[SourceRecord]:
        """Lists the files of the text that its documents come from."""
        return self.manifest.sources[sum(other.sources for other in self.manifest.origins) :]

    @property
    def faults(self) -> Faults:
        """Returns the faults of that text alone."""
        corpus, others = self.manifest.corpus, self.manifest.origins
        own = slice(sum(other.skipped for other in others), len(corpus.skipped) - (corpus.lost or 0))
        theirs = sum_filtered(others)
        filtered = {name: count - theirs.get(name, 0) for name, count in (corpus.filtered or {}).items()}
        replaced = corpus.replaced - sum(other.replaced for other in others)
        empty = self._empty - sum(file.empty for file in self.manifest.kept)
        passed = filtered if corpus.filtered is not None else None
        no_text = Counter(corpus.no_text) - sum_counts(other.no_text for other in others)
        return Faults(corpus.skipped[own], replaced, passed, max(0, empty), no_text)

    @property
    def _empty(self) -> int:
        """Counts the documents of that text that had no text or no pieces."""
        return self.manifest.corpus.empty - sum(other.empty for other in self.manifest.origins)

    @property
    def key(self) -> str:
        """Hash of the documents and of the vocabulary that they were cut with."""
        parts = (self.manifest.vocabulary.sha256, *(file.sha256 for file in self.manifest.kept))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def path_from(self, out: Path) -> str:
        """Returns the path relative to another folder, so that both can be moved together."""
        return Path(os.path.relpath(self.folder.resolve(), out.resolve())).as_posix()

    def record(self, out: Path) -> OriginRecord:
        """Makes the record of the folder for the manifest of another one."""
        faults = self.faults
        counts = len(self.sources), len(faults.skipped), faults.replaced, faults.filtered, self._empty
        return OriginRecord(self.path_from(out), self.key, *counts, dict(faults.no_text))


@dataclass(frozen=True)
class Origins:
    """All the folders of a run, in the order of the corpus."""

    folders: tuple[Origin, ...] = ()

    @property
    def manifests(self) -> list[Manifest]:
        """Lists what their manifests say."""
        return [origin.manifest for origin in self.folders]

    @property
    def kept_files(self) -> list[KeptFile]:
        """Lists the files of their documents."""
        return [file for manifest in self.manifests for file in manifest.kept]

    def load_vocabulary(self) -> Vocabulary:
        """Loads the vocabulary that all of them were cut with."""
        first = self.folders[0]
        said = first.manifest.vocabulary
        vocabulary = load_own_vocabulary(first.folder, first.manifest)
        for other in self.folders[1:]:
            if (other.manifest.vocabulary.sha256, other.manifest.vocabulary.cased) != (said.sha256, said.cased):
                raise UserError(
                    f"--from {other.folder}: cut with another vocabulary than {first.folder}\n"
                    f"cut its text anew: --docs PATH --vocab {quote(first.folder)} --documents-only"
                )
        return vocabulary

    def read_settings(self) -> dict[str, Any]:
        """Returns the settings that decided what the documents are: those of the first folder if they differ."""
        said = self.manifests[0].settings.as_json()
        return {name: said[name] for name in (*list_by(Fact.CUTS, Fact.READS, Fact.KEPT), *NO_FORMULAS) if name in said}

    def read_by_source(self, name: str) -> dict[str, Any]:
        """Returns the values of a setting by source, for the sources that it was given for."""
        found: dict[str, Any] = {}
        for origin in self.folders:
            said = origin.manifest.settings.as_json().get(name)
            for source in {file.source for file in origin.manifest.kept}:
                value = said.get(source, said.get("")) if isinstance(said, dict) else said
                found |= {source: value} if value is not None else {}
        return found

    def make_tasks(self, out: Path, errors: Errors) -> Iterator[TakeTask]:
        """Makes a task of every file of documents; `out` is the folder that shards of them are made in."""
        for origin in self.folders:
            place = origin.folder.absolute(), origin.path_from(out), origin.key  # once: the key is a hash of all files
            for file in origin.manifest.kept:
                yield TakeTask(*place, file, errors)


def load_own_vocabulary(folder: Path, manifest: Manifest) -> Vocabulary:
    """Loads the vocabulary of a finished folder; raises DamageError where it is not the one of its manifest."""
    vocabulary = load_vocabulary(folder, manifest.vocabulary.cased)
    if vocabulary.sha256 != manifest.vocabulary.sha256:
        raise DamageError(f"{folder / vocabulary.file}: not the vocabulary that its {MANIFEST} tells of: it was edited")
    return vocabulary


def find_origins(given: Iterable[str]) -> Origins:
    """Finds the folders that --from names, or those of whose documents they were made."""
    found = [origin for folder in given for origin in find_origins_of_folder(Path(folder), f"--from {folder}")]
    for place, count in Counter(origin.folder.resolve() for origin in found).items():
        if count > 1:
            raise UserError(f"--from: {place.name} is named twice, or documents of it are; each text counts once")
    return Origins(tuple(found))


def find_repeated(groups: Iterable[tuple[str, list[SourceRecord]]]) -> Iterator[str]:
    """Names files that several groups of them have; raises UserError where all files of a group are in others."""
    seen: dict[tuple[int, str], str] = {}
    for name, files in groups:
        again = [file for file in files if file.content and (file.size, file.content) in seen]
        if again:
            first = f"{name}: {again[0].name} is in {seen[again[0].size, again[0].content]} too"
            if len(again) == len(files):
                raise UserError(f"{first}, and so is all of its text; each text counts once")
            yield f"{first} ({len(again):,} such files); --drop-copies leaves copies of documents out"
        seen |= {(file.size, file.content): name for file in files}


def find_origins_of_folder(folder: Path, named: str) -> Iterator[Origin]:
    """Goes through the folders whose documents a folder has: others, then itself."""
    own = _read_origin(folder, named)
    for record in own.manifest.origins:
        place = Path(os.path.normpath(folder.resolve() / record.folder))
        gone = f"its documents were in {place}, which is gone; name the folder that has them: --from FOLDER"
        if not place.is_dir():
            raise UserError(f"{named}: {gone}")
        other = _read_origin(place, named)
        if other.key != record.key:
            raise UserError(f"{named}: {gone.replace('is gone', 'was made anew since')}")
        yield other
    if own.manifest.kept:
        yield own
    elif not own.manifest.origins:
        raise UserError(f"{named}: has no documents: it was made with --no-documents, or by an earlier version")


def _read_origin(folder: Path, named: str) -> Origin:
    """Reads and checks the manifest of a folder."""
    if not folder.is_dir():
        raise UserError(f"{named}: {absence(folder, 'folder')}")
    manifest = Manifest.read(folder)
    require_seal(folder / MANIFEST)
    if manifest.kept and manifest.kept_format not in KEPT_FORMATS:
        raise UserError(
            f"{named}: its documents are of format {manifest.kept_format}, and this version reads "
            f"{' and '.join(map(str, KEPT_FORMATS))}\n"
            "make the folder anew from the text"
        )
    return Origin(folder, manifest)


@dataclass(frozen=True)
class TakeTask:
    """Asks a worker to check one file of documents."""

    folder: Path
    """The folder that has it, by its full path."""
    way: str
    """The path of that folder relative to the output folder."""
    key: str
    """The key of that folder."""
    file: KeptFile
    errors: Errors

    @property
    def name(self) -> str:
        """Identifies the task within its step."""
        return f"{self.key[:16]}/{self.file.path}"

    @property
    def weight(self) -> int:
        """Counts the pieces of the documents."""
        return self.file.pieces


def take_file(task: TakeTask) -> TokensRecord:
    """Finds a file of documents whole, or under --errors skip leaves it out."""
    file = task.file
    counts = {name: getattr(file, name) for name in COUNTS}
    place = f"{task.way}/{file.path}"
    record = TokensRecord(files=[], elsewhere=place, source=file.source, documents=file.rows, **counts)
    if not (fault := describe_damage(task)):
        return record
    if task.errors != "skip":
        raise UserError(f"{fault}\nmake the folder anew, or leave these documents out with --errors skip")
    lost = fault.replace(f"{task.folder}/", f"{task.folder.name}/")
    return record.model_copy(update={"documents": 0, **dict.fromkeys(counts, 0), "lost": lost})


def describe_damage(task: TakeTask) -> str:
    """Describes the damage of a file, or returns ""; raises UserError if this host does not see its folder."""
    if not task.folder.is_dir():
        raise UserError(f"{task.folder}: not seen here: all hosts must see it by this path")
    try:
        path = task.file.find(task.folder)
    except DamageError as error:
        return str(error)
    return "" if sha256(path) == task.file.sha256 else f"{path}: the content changed after it was written"


def make_kept_file(record: TokensRecord) -> KeptFile:
    """Makes the record of a file of documents for the manifest."""
    [file] = record.files
    return KeptFile(**file.as_json(), source=record.source, **{name: getattr(record, name) for name in COUNTS})


TAKE = Step("taken", take_file, TokensRecord, "pieces")
