"""The corpora of a run: one folder of shards, or several with names, all of one vocabulary.

--data data/wiki
--data wiki=data/wiki books=data/books
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from data_prep.common.errors import UserError, check_all, quote
from data_prep.common.files import wait_for_storage
from data_prep.shards import MANIFEST, Manifest, SetFigures

NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
"""Names of corpora: they are keys of recipes and parts of the names of figures."""


@dataclass(frozen=True)
class CorpusFolder:
    """A folder of shards."""

    name: str
    """name in recipes and logs; empty for a folder that was given without one"""
    folder: Path
    manifest: Manifest
    _mean_pieces: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """mean numbers of pieces by length, as far as they were asked for"""

    @classmethod
    def read(cls, name: str, folder: Path, waits: bool = True) -> CorpusFolder:
        """Reads the manifest; raises UserError without examples. It waits for storage that does not answer, if it
        `waits`."""
        read = partial(Manifest.read, folder)
        manifest = wait_for_storage(read, folder / MANIFEST, usual=0) if waits else read()
        manifest.require_examples(folder)
        return cls(name, folder, manifest)

    def __str__(self) -> str:
        return f"{self.name}={self.folder}" if self.name else str(self.folder)

    def count_examples(self, length: int) -> float:
        """Counts the training examples of a duplicate that serve for a length; the mean if duplicates differ."""
        sets = self._list_sets(length)
        return sum(each.examples for each in sets) / max(len(sets), 1)

    def measure_pieces(self, length: int) -> float:
        """Computes the mean number of pieces of these examples, cut to the length; once, as every log line asks."""
        if length not in self._mean_pieces:
            sets = self._list_sets(length)
            pieces = (count * min(size, length) for each in sets for size, count in enumerate(each.histogram))
            self._mean_pieces[length] = sum(pieces) / max(sum(each.examples for each in sets), 1)
        return self._mean_pieces[length]

    def _list_sets(self, length: int) -> list[SetFigures]:
        stored = self.manifest.length_for(length)
        return [each for each in self.manifest.figures if each.length == stored and not each.validation]


@dataclass(frozen=True)
class Corpora:
    """The corpora of a run; all have the same vocabulary and the same kind of examples."""

    parts: tuple[CorpusFolder, ...]

    @classmethod
    def one(cls, folder: Path, manifest: Manifest | None = None) -> Corpora:
        """Makes the corpora of one folder without a name; reads its manifest if that is not given."""
        return cls((CorpusFolder.read("", folder) if manifest is None else CorpusFolder("", folder, manifest),))

    @classmethod
    def read(cls, words: Sequence[str | Path], waits: bool = True, together: bool = True) -> Corpora:
        """Reads the corpora of `--data`, sorted by name; reports all faults. Those read `together` must be alike."""
        named = [split_word(str(word)) for word in words]
        if faults := [*find_name_faults(named)]:
            raise UserError("\n".join(faults))
        parts = check_all(*(partial(_read_part, *each, waits) for each in named))
        if together and (faults := [*cls(tuple(parts)).find_differences()]):
            raise UserError("\n".join(faults))
        return cls(tuple(sorted(parts, key=lambda part: str(part.name))))

    @property
    def is_named(self) -> bool:
        """Whether the corpora have names, by which phases can mix them."""
        return bool(self.parts[0].name)

    @property
    def folder(self) -> Path:
        """The folder that the vocabulary is read from: the first."""
        return self.parts[0].folder

    @property
    def common(self) -> Manifest:
        """The manifest of the first corpus, for what is the same in all: vocabulary, casing, pairs and masking."""
        return self.parts[0].manifest

    @property
    def fingerprint(self) -> str:
        """Identifies names and contents: of one folder without a name, the fingerprint of its manifest."""
        if not self.is_named:
            return self.common.fingerprint
        known = {part.name: part.manifest.fingerprint for part in self.parts}
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def __str__(self) -> str:
        return " ".join(map(str, self.parts))

    def lengths(self) -> list[int]:
        """Lists the lengths that any of the corpora has."""
        return sorted({length for part in self.parts for length in part.manifest.lengths()})

    def select(self, names: Collection[str]) -> Corpora:
        """Selects the corpora with these names."""
        return Corpora(tuple(part for part in self.parts if part.name in names))

    def find_length_fault(self, length: int) -> str | None:
        """Describes why a phase of this length cannot read all these corpora together; None if it can."""
        stored = {part.manifest.length_for(length) for part in self.parts}
        if len(stored) == 1 and None not in stored:
            return None
        there = "; ".join(f"{part} has {', '.join(map(str, part.manifest.lengths()))}" for part in self.parts)
        return f"its corpora have no common length for it: {there}"

    def find_differences(self) -> Iterator[str]:
        """Yields the faults of corpora that one run cannot read together with the first."""
        first = self.parts[0]
        for part in self.parts[1:]:
            ours, theirs = first.manifest, part.manifest
            if ours.vocabulary.sha256 != theirs.vocabulary.sha256:
                cure = f"make it with shard.py --vocab {quote(first.folder)}"
                yield f"--data {part}: has another vocabulary than {first}; {cure}"
                continue
            facts = {
                "cased": (ours.vocabulary.cased, theirs.vocabulary.cased),
                "tokenizer": (ours.settings.tokenizer, theirs.settings.tokenizer),
                "pairs": (ours.settings.pairs, theirs.settings.pairs),
                "masking": (ours.settings.masking, theirs.settings.masking),
            }
            for name, (one, other) in facts.items():
                if one != other:
                    yield f"--data {part}: was made with {name} = {other}, and {first} with {one}; make them alike"


def split_word(word: str) -> tuple[str, Path]:
    """Parses NAME=FOLDER or FOLDER; the name of a folder that exists may contain =."""
    name, equals, folder = word.partition("=")
    if equals and not (name and folder):
        raise UserError(f"--data {word}: is half a corpus; give NAME=FOLDER")
    return ("", Path(word)) if not equals or os.path.isdir(word) else (name, Path(folder))


def find_name_faults(named: Sequence[tuple[str, Path]]) -> Iterator[str]:
    """Yields the faults in names and folders of corpora, without reading them."""
    folders, names = dict[Path, str](), dict[str, Path]()
    for name, folder in named:
        said = f"--data {name}={folder}"
        if not name and len(named) > 1:
            yield f"--data {folder}: of several corpora each needs a name: --data wiki={quote(folder)} …"
            return
        if name and not NAME.fullmatch(name):
            yield f"{said}: a name has letters, digits and _, and begins with a letter"
        if name in names:
            yield f"{said}: {names[name]} has the same name"
        if (place := folder.resolve()) in folders:
            yield f"{said}: is the folder of {folders[place]} too"
        names[name], folders[place] = folder, name


def _read_part(name: str, folder: Path, waits: bool) -> CorpusFolder:
    try:
        return CorpusFolder.read(name, folder, waits)
    except UserError as error:
        raise UserError(f"--data {name}{'=' * bool(name)}{error}") from error
