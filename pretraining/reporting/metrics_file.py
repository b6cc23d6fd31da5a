"""Reads metrics.jsonl from outside a run: quickly, however long it is, and while it is being written.

`RunLog` writes the file. A last line without a newline is still being written, and is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data_prep.common.files import open_at_once

METRICS = "metrics.jsonl"
REACH = 1 << 21
"""Bytes at the end that are searched for the newest records: some 3,000 lines."""


class Logged(NamedTuple):
    """A line of metrics.jsonl with figures."""

    step: int
    figures: Mapping[str, float]

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Logged:
        """Takes the numbers of a record, without None."""
        figures = {name: value for name, value in record.items() if isinstance(value, int | float)}
        return cls(int(figures["step"]), figures)


def read_newest_records(path: Path, kinds: Collection[str]) -> dict[str, dict[str, Any]]:
    """Reads the newest record of each kind among the last 3,000 lines or so."""
    with open(path, "rb", opener=open_at_once) as file:
        size = file.seek(0, 2)
        found = {str(record.get("kind")): record for record in _read_records(file, max(0, size - REACH), size)}
    return {kind: found[kind] for kind in kinds if kind in found}


def read_all_records(path: Path) -> Iterator[dict[str, Any]]:
    """Reads all records of a short file, if it exists."""
    with suppress(FileNotFoundError), open(path, "rb", opener=open_at_once) as file:
        yield from _read_records(file, 0, file.seek(0, 2))


def read_evaluations(path: Path) -> Iterator[Logged]:
    """Reads the records of validation, which are few; other lines are not parsed."""
    with open(path, "rb", opener=open_at_once) as file:
        for line in file:
            if line.startswith(b'{"kind": "evaluation"') and line.endswith(b"\n"):
                with suppress(ValueError, KeyError):
                    yield Logged.from_record(json.loads(line))


def read_step_records(path: Path) -> list[Logged]:
    """Reads the step records of a run that have a loss; of steps that were repeated, the last."""
    curve: list[Logged] = []
    for record in read_all_records(path):
        step, loss = record.get("step"), record.get("loss")
        if record.get("kind") == "step" and isinstance(step, int) and isinstance(loss, int | float):
            while curve and curve[-1].step >= step:
                curve.pop()
            curve.append(Logged.from_record(record))
    return curve


def _read_records(file: BinaryIO, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Reads the records whose lines lie wholly between two offsets, without damaged lines."""
    file.seek(begin)
    lines = file.read(end - begin).split(b"\n")
    for line in lines[1 if begin else 0 : -1]:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record
