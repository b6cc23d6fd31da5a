"""The folder `.cloze-work`: what a run keeps until its shards are finished, and by which another run goes on.

OUT/.cloze-work/
  plan.json                the settings and sources that the run began with
  lock                     which process is at work here
  STEP.jsonl               the records of the tasks of a step that are done: what each has written, a line for each
  STEP.finished            exists once all tasks of the step are done
  parts.arrow held-out.npy where the token documents are, and which of them are held out for validation
  held-out-once.npy        the latter by the numbers that documents have before any is repeated
  copies.u8                which documents have the text of an earlier one, where such are left out
  near-parts.arrow near-copies.u8
                           where documents were when near copies were looked for, and which are some
  ranks/                   heartbeats of the ranks of an MPI job
  documents/ words/ unique/ signatures/ candidates/ near-copies/ distinct/ limited/ passages/ weighed/
  examples-128/ merged-128-1/
                           the Arrow files that steps hand on to later ones

The documents in pieces are in OUT/documents from the beginning, since they stay.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import Field

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, read_json, replacing, writable, write_json
from data_prep.shards import KEPT, PLAN, WORK, Counts, Ingredients, JsonObject, TextCounts, name_length_folder

LAYOUT = 5  # version of how this folder is laid out; no other one is read


class Record(JsonObject):
    """The record of a task that is done: the files that it wrote; subclasses add counts."""

    files: list[FileRecord]

    @property
    def path(self) -> str:
        """Names the one file that most tasks write, relative to the output folder."""
        return self.files[0].path


Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class TextFile(FileRecord):
    """The record of a file of documents."""

    text_bytes: int
    """How many bytes of text the documents have."""


@dataclass(frozen=True)
class FilteredExample:
    """A document that a filter left out, for the report."""

    rank: str
    """A random rank: the examples of the smallest ranks are reported."""
    number: int
    """The number of the document among those that its task read."""
    figure: str
    """The value that the filter measured."""
    id: str
    title: str
    beginning: str
    """The first characters of the text."""


@dataclass(frozen=True)
class Filtered:
    """The documents of a task that a filter left out."""

    count: int
    examples: list[FilteredExample]


class DocumentsRecord(Record):
    """The record of a task that reads documents."""

    files: list[TextFile]  # type: ignore[assignment]
    source: str
    skipped: list[str]
    """Faults of the text, with paths, for the user."""
    left_out: list[str]
    """The same without paths of this machine, for the manifest."""
    replaced: int
    """Documents in which bad characters were replaced."""
    filtered: dict[str, Filtered] = Field(default_factory=dict)
    """Documents left out by each filter, by the name of its setting."""
    empty: int = 0
    """Documents without text, which are left out."""
    no_text: dict[str, int] = Field(default_factory=dict)
    """Numbers of pages and lines that the format leaves out, by format and what they are."""

    @property
    def documents(self) -> int:
        """Counts the documents that were read, without those that filters left out."""
        return sum(file.rows for file in self.files)

    @property
    def num_filtered(self) -> int:
        """Counts the documents that filters left out."""
        return sum(filtered.count for filtered in self.filtered.values())


class TokensRecord(Record, TextCounts):
    """The record of a task that wrote a file of token documents."""

    source: str
    elsewhere: str = ""
    """The path of the file, if it is in another folder."""
    lost: str = ""
    """Why such a file was left out, if it is damaged."""
    documents: int
    books: int | None = None
    """Documents before passages for validation were cut out of them, where they are."""
    held_out: tuple[int, ...] = ()
    """The rows that are held out, where that is known of the file alone."""

    @property
    def path(self) -> str:
        """Names the file, as it is found from the output folder."""
        return self.elsewhere if self.elsewhere and not self.files else super().path


class ExamplesRecord(Record):
    """The record of a task that makes the examples of a part."""

    counts: list[Counts]
    """Counts of the examples of every set of shards."""


@dataclass(frozen=True)
class Journal(Generic[Kind]):
    """The file in which the records of a step are kept, each added as its task is done."""

    path: Path
    kind: type[Kind]

    def read(self) -> Iterator[tuple[str, int, Kind]]:
        """Yields the names of the tasks that are done, where their records begin, and the records."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            place = 0
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    content = json.loads(line)
                    task, record = content["task"], content["record"]
                except (ValueError, KeyError, TypeError) as error:
                    raise DamageError(f"{self.path}: cannot be read: byte {place:,}: {error}") from error
                yield task, place, self.kind.from_content(record, f"{self.path}: byte {place:,}")
                place += len(line)

    def repair(self) -> None:
        """Makes ready for records to be added: takes off a line that was being written when a run was killed."""
        with writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                with self.path.open("rb+") as file:
                    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def add(self, done: Iterable[tuple[str, Kind]]) -> list[int]:
        """Keeps the records of tasks, so that no later run does these tasks again; returns where the records begin."""
        places = []
        with writable(self.path), self.path.open("ab") as file:
            for task, record in done:
                places.append(file.tell())
                content = {"task": task, "record": record.as_json()}
                file.write(json.dumps(content, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())  # before anything is deleted that the tasks have consumed
        return places


@dataclass(frozen=True)
class Records(Generic[Kind]):
    """The records of tasks, in an order of their own, which are read from the disk whenever they are gone through."""

    journal: Journal[Kind]
    places: tuple[int, ...]
    """Where the records begin in the file."""

    def __iter__(self) -> Iterator[Kind]:
        if not self.places:
            return
        with self.journal.path.open("rb") as file:
            for place in self.places:
                file.seek(place)
                yield self.journal.kind(**json.loads(file.readline())["record"])


@dataclass(frozen=True)
class Joined(Generic[Kind]):
    """The records of several steps, one after another, which are gone through as those of one."""

    steps: tuple[Iterable[Kind], ...]

    def __iter__(self) -> Iterator[Kind]:
        return chain.from_iterable(self.steps)


@dataclass(frozen=True)
class WorkFolder:
    """The work folder of an output folder, with the state of an unfinished run."""

    out: Path
    """The output folder, which all paths in records are relative to."""

    @property
    def path(self) -> Path:
        """Names the work folder itself."""
        return self.out / WORK

    def read_plan(self) -> Ingredients:
        """Reads the settings and sources that the run began with."""
        path = self.out / PLAN
        plan = read_json(path)
        if not isinstance(plan, dict) or plan.get("layout") != LAYOUT:
            raise UserError(f"{path}: damaged, or of another version: remove the folder, or take another --out")
        return Ingredients.from_content(plan, path)

    def write_plan(self, plan: Ingredients) -> None:
        """Keeps the settings and sources, for comparison when the run is continued."""
        write_json(self.out / PLAN, {**plan.as_json(), "layout": LAYOUT})

    def list_steps(self) -> list[str]:
        """Lists the steps that have a finished task, in the order in which they began."""
        journals = [path for path in self.path.glob("*.jsonl") if path.stat().st_size]
        return [path.stem for path in sorted(journals, key=lambda path: (path.stat().st_ctime_ns, path.stem))]

    def journal(self, step: str, kind: type[Kind]) -> Journal[Kind]:
        """Returns the journal of a step."""
        return Journal(self.path / f"{step}.jsonl", kind)

    def read_records(self, step: str) -> list[Record]:
        """Reads the records of the tasks of a step that are done, whether the step is finished or not."""
        return list({task: record for task, _, record in self.journal(step, Record).read()}.values())

    def find_whole_tasks(self, step: str) -> Iterator[tuple[str, int]]:
        """Finds the tasks whose files are still whole in size, with the places of their records."""
        for task, place, record in self.journal(step, Record).read():
            sizes = {self.out / file.path: file.size for file in record.files}
            if all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()):
                yield task, place

    def is_finished(self, step: str, key: str = "") -> bool:
        """Returns whether all tasks of a step are done; `key` must be that of `finish`, if the inputs may change."""
        mark = self._mark(step)
        return mark.exists() and mark.read_text() == key

    def finish(self, step: str, key: str = "") -> None:
        """Marks a step as finished."""
        with replacing(self._mark(step)) as file:
            file.write(key.encode())

    def reopen(self, *steps: str) -> None:
        """Marks steps as not finished, so that their tasks are looked at one by one."""
        for step in steps:
            self._mark(step).unlink(missing_ok=True)

    def undo(self, *steps: str) -> None:
        """Forgets that steps were ever begun, with all that they wrote."""
        for step in steps:
            self.reopen(step)
            (self.path / f"{step}.jsonl").unlink(missing_ok=True)
        self.forget(*steps)

    def forget(self, *steps: str) -> None:
        """Deletes the Arrow files of steps, when no later step reads them any more."""
        for step in steps:
            shutil.rmtree(self.path / step, ignore_errors=True)

    def delete_other_documents(self, files: Iterable[FileRecord]) -> None:
        """Deletes the files of documents in pieces but for these: what an earlier start left, or all if none stays."""
        kept = {self.out / file.path for file in files}
        for path in (self.out / KEPT).rglob("*"):
            if path.is_file() and path not in kept:
                path.unlink()
        if not kept:
            shutil.rmtree(self.out / KEPT, ignore_errors=True)

    def remove_shards(self, lengths: Iterable[int]) -> None:
        """Deletes the shards of some lengths."""
        for length in lengths:
            shutil.rmtree(self.out / name_length_folder(length), ignore_errors=True)

    def refuse_foreign(self) -> None:
        """Raises UserError if the folder has files of somebody else: runs write into empty folders and their own."""
        if self.out.is_dir() and any(self.out.iterdir()) and not self.path.is_dir():
            raise UserError(f"{self.out}: holds other files already; give --out a new folder")

    def remove(self) -> None:
        """Deletes the work folder, as far as that goes: on NFS, its lock stays until the process ends."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _mark(self, step: str) -> Path:
        return self.path / f"{step}.finished"


def make_numbered_path(step: str, number: int) -> str:
    """Names the file that a step writes for a number, relative to the output folder."""
    return f"{WORK}/{step}/{number // 1000:04}/{number:07}.arrow"


def spell_value(value: Any) -> str:
    """Spells the value of a setting as its user gives it."""
    if isinstance(value, dict):
        return " ".join(f"{name}={spell_value(one)}" if name else spell_value(one) for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(spell_value, value))
    return "not given" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)
