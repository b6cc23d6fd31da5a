#!/usr/bin/env python3
"""Runs the parts of `make gpu` one after another in this process; `run.py` starts it, and says how."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()
    from pretraining.processes.environment import prepare_process

    prepare_process()

import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.parts import PARTS, Part, Place
from benchmarks.gpu.run import BROKEN, ENDING, FOUND, GpuRun, read_state
from benchmarks.measure import describe_environment, run_command
from benchmarks.peer import find_missing_packages
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json
from pretraining.devices import explain_absence
from pretraining.processes.group import disconnect

SUBJECT = ("gpu", "torch", "commit")
"""Facts on which all results depend: if one changes, all parts run again."""


def choose(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """Returns the parts with these names or prefixes of names; all if none is given."""
    begin = {name: [part for part in parts if f"{part.name}-".startswith(f"{name}-")] for name in names}
    if unknown := [name for name, found in begin.items() if not found]:
        raise UserError(
            f"{', '.join(unknown)}: no part of this name; there is {', '.join(part.name for part in parts)}"
        )
    return [part for part in parts if not names or any(part in found for found in begin.values())]


class Results:
    """The results of all parts, in a file that is written before and after each."""

    def __init__(self, settings: GpuRun, about: dict[str, Any], console: Console) -> None:
        self._path, self.state = settings.folder / FOUND, read_state(settings.folder)
        subject = {name: about.get(name) for name in SUBJECT}
        if self.state.get("subject", subject) != subject:
            aside = self._path.rename(self._path.with_stem("results-before"))
            console.print(f"another GPU, torch or commit: all is measured anew; the results of before are in {aside}")
            self.state = {"parts": {}}
        self.state |= {"subject": subject, "environment": about}

    def find_end(self, part: Part, settings: GpuRun) -> str:
        """Finds how a part has ended that is not to be run again; "" for any other."""
        record = self.state["parts"].get(part.name, {})
        again = settings.again or settings.dry
        old = record.get("begun", 0.0) < settings.since
        return "" if old and (again or record.get("ended") != "done") else str(record["ended"])

    def run(self, part: Part, place: Place) -> str:
        """Runs a part, and keeps what it has measured; returns how it ended."""
        begun, ended = time.time(), "done"
        self.state["running"] = {"name": part.name, "begun": begun, "limit": begun + 60 + 3 * part.seconds}
        write_json(self._path, self.state)
        threads, found = torch.get_num_threads(), None
        try:
            found = part.measure(place)
        except Exception as error:
            ended = f"failed: {error}"
            if not isinstance(error, UserError):
                traceback.print_exc()
        torch.set_num_threads(threads)
        disconnect()
        measured = read_json(place.out) if place.out.exists() else found
        record = {"begun": begun, "ended": ended, "seconds": round(time.time() - begun, 1), "measured": measured}
        del self.state["running"]
        self.state["parts"][part.name] = record
        write_json(self._path, self.state)
        return f"{ended} after {record['seconds']} s"


def has_fault() -> bool:
    """Whether the GPU fails all that this process asks of it, as after an illegal address."""
    try:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda").sum().item()
    except RuntimeError as error:
        print(f"the GPU fails: {error}")
        return True
    return False


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    chosen = choose(PARTS, settings.parts)
    if settings.do == "list":
        console.print("\n".join(f"{part.name:14} {part.seconds:4} s  {part.what}" for part in chosen), markup=False)
        return Code.DONE
    about = describe_environment(["torch", "triton", "deepspeed", "transformers", "numpy"])
    if not settings.dry and "gpu" not in about:
        why, cure = explain_absence()
        raise UserError(f"torch {torch.__version__} finds no GPU: {why}\n{cure}, or take make gpu DRY=1")
    results, left = Results(settings, about, console), list[str]()
    for part in chosen:
        if ended := results.find_end(part, settings):
            console.print(f"== {part.name}: {ended} already", markup=False)
        elif absent := find_missing_packages(*part.needs):
            console.print(f"== {part.name}: left out, for want of {', '.join(absent)}", markup=False)
        elif settings.until - ENDING - time.time() < part.seconds:
            left.append(part.name)
        else:
            console.print(f"== {part.name}: {part.what}", markup=False)
            with tempfile.TemporaryDirectory() as scratch:
                place = Place(settings.dry, settings.folder, Path(scratch) / "found.json", console)
                console.print(f"== {part.name}: {results.run(part, place)}", markup=False)
            if has_fault():
                return BROKEN
    if left:
        console.print(f"left for the next time: {', '.join(left)}; the same command goes on with them")
    return Code.STOPPED if left else Code.DONE


if __name__ == "__main__":
    run_command(GpuRun, measure, "gpu")
