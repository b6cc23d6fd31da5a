"""The folder `.cloze-work`: what a run keeps until its shards are finished, and by which another run goes on.

OUT/.cloze-work/
  plan.json                the settings and sources that the run began with
  lock                     which process is at work here
  records/STEP/TASK.json   what a task has written, for the tasks of a step that is not finished
  STEP.json                the records of all tasks of a finished step
  held-out.npy             which documents are held out for validation
  documents/ words/ tokens/ examples/     the Arrow files that steps hand on to later ones
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.common.errors import DamageError, UserError
from data_prep.common.files import FileRecord, read_json, write_json
from data_prep.shards import PLAN, WORK, meant

Record = dict[str, Any]  # what a task tells of its work; its "files" are those that it wrote
SOURCE_KEYS = ("source", "name", "size", "format", "content")
"""What a plan has of each source file, by which plans are compared: nothing of this machine, nor of when."""
OLD_SOURCE_KEYS = SOURCE_KEYS[:-1]  # of plans and manifests of before, without the key of the content
STEPS = ("documents", "words", "vocabulary", "tokens", "examples", "shards")


@dataclass(frozen=True)
class WorkFolder:
    """What an unfinished run has left in the work folder of an output folder."""

    out: Path
    """The output folder, which all paths in records are relative to."""

    @property
    def path(self) -> Path:
        """Names the work folder itself."""
        return self.out / WORK

    def read_plan(self) -> Record:
        """Reads the settings and sources that the run began with."""
        plan: Record = read_json(self.out / PLAN)
        return plan

    def write_plan(self, plan: Record) -> None:
        """Keeps the settings and sources, for comparison when the run is continued."""
        write_json(self.out / PLAN, plan)

    def is_begun(self) -> bool:
        """Tells whether any task of any step is done under a plan, which no other settings can go on from."""
        any_task = any(self.path.glob("records/*/*.json")) or any(self.is_finished(step) for step in STEPS)
        return any_task and (self.out / PLAN).exists()

    def is_finished(self, step: str) -> bool:
        """Tells whether all tasks of a step are done."""
        return self._summary(step).exists()

    def read_records(self, step: str) -> list[Record]:
        """Reads the records of the tasks of a step that are done, whether the step is finished or not."""
        if self.is_finished(step):
            return list(read_json(self._summary(step))["records"])
        return [read_json(path) for path in sorted(self._records(step).glob("*.json"))]

    def read_record(self, step: str, task: str) -> Record | None:
        """Reads the record of a task, where there is one whose files are still whole in size."""
        try:
            record: Record = read_json(self._records(step) / f"{task}.json")
        except (FileNotFoundError, DamageError):
            return None
        sizes = {self.out / file["path"]: file["size"] for file in record["files"]}
        whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
        return record if whole else None

    def write_record(self, step: str, task: str, record: Record) -> None:
        """Keeps the record of a task, so that no later run does the task again."""
        write_json(self._records(step) / f"{task}.json", record)

    def finish(self, step: str, records: Iterable[Record]) -> None:
        """Marks a step as finished; its records go into one file, in the order given."""
        write_json(self._summary(step), {"records": list(records)})
        shutil.rmtree(self._records(step), ignore_errors=True)

    def forget(self, *steps: str) -> None:
        """Deletes the Arrow files of steps, when no later step reads them any more."""
        for step in steps:
            shutil.rmtree(self.path / step, ignore_errors=True)

    def remove(self) -> None:
        """Deletes the work folder, as far as that goes: on NFS, its lock stays until the process ends."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _summary(self, step: str) -> Path:
        return self.path / f"{step}.json"

    def _records(self, step: str) -> Path:
        return self.path / "records" / step


def examples_path(task: str, length: int) -> str:
    """Names the file of the examples of one length that a task makes, relative to the output folder."""
    return f"{WORK}/examples/{task}-{length}.arrow"


def file_records(record: Record) -> list[FileRecord]:
    """Lists the files that a task has written, without what the task tells of them besides."""
    return [FileRecord(file["path"], file["size"], file["rows"], file["sha256"]) for file in record["files"]]


def refuse_changes(folder: Path, before: Record, now: Record) -> None:
    """Raises UserError if a folder was begun with other settings or sources."""
    theirs, ours = meant(before["settings"]), meant(now["settings"])
    changes = [
        f"  --{name.replace('_', '-')} was {_spelled(before['settings'].get(name))}, now {_spelled(value)}"
        for name, value in now["settings"].items()
        if theirs.get(name) != ours.get(name)
    ]
    keys = SOURCE_KEYS if all("content" in file for file in before["sources"]) else OLD_SOURCE_KEYS
    was, given = ([tuple(file[key] for key in keys) for file in plan["sources"]] for plan in (before, now))
    if was != given:
        names = sorted({file[1] for file in {*was} ^ {*given}})
        changes.append(f"  --docs: {len(names)} files differ" + (f", such as {names[0]}" if names else ""))
    if before["given_vocabulary"] != now["given_vocabulary"]:
        changes.append("  --vocab: another vocabulary")
    if changes:
        raise UserError(
            f"{folder} was made with other settings:\n" + "\n".join(changes) + "\n"
            "give the same settings to continue, another --out, or remove the folder"
        )


def _spelled(value: Any) -> str:
    """Spells the value of a setting as its user gives it."""
    if isinstance(value, dict):
        return " ".join(f"{name}={one}" if name else str(one) for name, one in value.items())
    return "not given" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def refuse_foreign(work: WorkFolder) -> None:
    """Raises UserError if the output folder has files of somebody else: runs write into empty folders and their own."""
    if work.out.is_dir() and any(work.out.iterdir()) and not work.path.is_dir():
        raise UserError(f"{work.out}: holds other files already; give --out a new folder")
