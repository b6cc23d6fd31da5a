#!/usr/bin/env python3
"""Runs the parts of `make gpu`, writes the results of each as soon as it ends, and prints their figures.

    python benchmarks/gpu/run.py --parts tests peer
    python benchmarks/gpu/run.py list
    python benchmarks/gpu/run.py keep

Each part is a process with a time limit. `build/gpu/results.json` has the results of all parts, `log.txt` their output;
the folder that the variable OUT names gets copies after each part. A part that is done is not run again, unless --again
is given or the GPU, torch or commit has changed. With --until, no part is started that needs more time than is left.
The exit code is 0 if all parts are done, 1 if one failed or ran out of time, 75 if some are left
for the next time, 2 for a mistake in the command.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks.gpu.parts import FIRST, SETUP, SHARDS, GpuPart, choose, format_figures, load_parts
from benchmarks.gpu.wheels import hide_packages
from benchmarks.measure import FORMAT, RESULTS, find_commit, run_command, write_results
from benchmarks.processes import Child
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

BENCHMARKS = Path(__file__).parent.parent
LIMIT, ENDING = 480.0, 15.0
"""Seconds that a part may take, twice as many as the longest needs; and those before --until that are reserved for
ending a part and writing its results."""
OUT, DRY = Path("build/gpu"), Path("build/gpu-dry")
"""Folders of the results."""
RESULTS_FILE, LOG, PROFILE = "results.json", "log.txt", "profile"
SUBJECT = ("gpu", "torch", "commit")
"""Keys of the setup on which all results depend: if one changes, all parts run again."""
MOST_BYTES = 16 << 20
"""Size limit of copied files: lent machines return no larger ones."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
Ended = Literal["done", "failed", "ran out of time"]


@dataclass(frozen=True)
class GpuRun:
    """Measures on a GPU, part by part."""

    do: tyro.conf.Positional[Literal["run", "list", "keep"]] = "run"
    """run: run the parts; list: list them; keep: copy the results into benchmarks/results."""
    parts: tuple[str, ...] = ()
    """Names of parts, or prefixes of names (default: all)."""
    again: bool = False
    """Run finished parts again."""
    dry: bool = False
    """Run all parts on a CPU with a tiny model."""
    until: float = math.inf
    """Start no part that cannot end by this time, in seconds since 1970 (default: no limit)."""

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return DRY if self.dry else OUT


class PartResults:
    """The results of all parts."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / RESULTS_FILE
        self.content: dict[str, Any] = read_json(self.path) if self.path.exists() else {"parts": {}}
        self.parts: dict[str, Any] = self.content["parts"]

    def is_done(self, part: GpuPart) -> bool:
        """Whether a part is done."""
        record = self.parts.get(part.name, {})
        return record.get("ended") == "done" and (part.name not in FIRST or record.get("where") == identify_machine())

    def add(self, part: GpuPart, record: dict[str, Any]) -> None:
        """Adds the results of a part, and writes the file."""
        self.parts[part.name] = record | ({"where": identify_machine()} if part.name in FIRST else {})
        write_json(self.path, self.content)
        self.copy()

    def copy(self) -> None:
        """Copies the files to the folder that the variable OUT names, if there is one, without subfolders."""
        copies = Path(os.environ.get("OUT") or self.folder)
        if copies.resolve() == self.folder.resolve():
            return
        copies.mkdir(parents=True, exist_ok=True)
        for path in (self.path, self.folder / LOG, *self.folder.glob(f"{PROFILE}/*/*/*")):
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                shutil.copyfile(path, copies / path.name)

    @property
    def setup(self) -> dict[str, Any]:
        """What the setup has found."""
        found: dict[str, Any] = self.parts.get(SETUP, {}).get("measured", {})
        return found

    def set_others_aside(self, setup: dict[str, Any] | None) -> bool:
        """Sets results aside if the setup found another GPU, torch or commit; returns whether it did."""
        if setup is None:
            return False
        subject = {name: setup.get(name) for name in SUBJECT}
        is_other: bool = self.content.get("subject", subject) != subject
        if is_other:
            aside = {"subject": self.content["subject"], "parts": dict(self.parts)}
            self.content.setdefault("earlier", []).append(aside)
            self.parts.clear()
        self.content["subject"] = subject
        return is_other


def identify_machine() -> dict[str, str]:
    """Identifies this boot of the machine, the commit and torch."""
    return {
        "boot": BOOT.read_text().strip() if BOOT.exists() else "",
        "commit": find_commit(),
        "torch": version("torch"),
    }


def run_limited(
    command: Sequence[str], limit: float, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> Ended:
    """Runs a command for a limited time, then ends all of its processes. `say` gets its lines."""
    child = Child(command, say, environment)
    try:
        code = child.wait(limit)
    finally:
        child.end()
    return "ran out of time" if code is None else "failed" if code else "done"


def build_environment(part: GpuPart, dry: bool) -> dict[str, str]:
    """Builds the environment of a part: in a dry run, without a GPU and the packages that a bare machine lacks."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not dry:
        return environment
    environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    return environment if part.name == SHARDS else hide_packages(environment)  # shards may be made elsewhere


class PartRunner:
    """Runs parts one after another, and keeps what each has measured."""

    def __init__(self, settings: GpuRun, measured: PartResults, say: Callable[[str], None]) -> None:
        self._settings, self._measured, self._say = settings, measured, say
        self._end = settings.until - ENDING
        self._made: dict[tuple[str, ...], dict[str, Any]] = {}
        """What commands have measured: in a dry run, several parts have the same tiny model."""
        self.bad: list[str] = []
        """Parts that failed or ran out of time."""
        self.later: list[str] = []
        """Parts that were not started, for lack of time."""

    def run(self, parts: Sequence[GpuPart]) -> None:
        """Runs the parts that are not done."""
        for part in parts:
            if self._is_left_out(part):
                continue
            self._say(f"== {part.name}: {part.what}")
            command = part.build_command(self._settings.folder, self._settings.dry)
            if command in self._made:
                self._measured.add(part, self._made[command])
                self._say(f"== {part.name}: the same command as before")
                continue
            record = self._made[command] = self._run_command(part, command)
            if part.name == SETUP and self._measured.set_others_aside(record.get("measured")):
                told = "another GPU, torch or commit than that of the results: they are set aside"
                self._say(f"{told}, and all is measured anew")
            self._measured.add(part, record)
            self._say(f"== {part.name}: {record['ended']} after {record['seconds']} s")
            if record["ended"] != "done":
                self.bad.append(part.name)
                if part.name in FIRST:  # all others need it
                    break

    def _is_left_out(self, part: GpuPart) -> bool:
        """Whether a part is not run now, which is said: it is done, lacks a package, or takes too long."""
        lacking = [name for name in part.needs if name in self._measured.setup.get("missing", {})]
        why = f"left out, for want of {', '.join(lacking)}" if lacking else ""
        if self._measured.is_done(part) and not self._settings.again:
            why = "done already"
        elif not why and part.name not in FIRST and self._end - time.time() < 60 * part.minutes:
            why = f"left for the next time: it takes {part.minutes:g} minutes, about"
            self.later.append(part.name)
        if why:
            self._say(f"== {part.name}: {why}")
        return bool(why)

    def _run_command(self, part: GpuPart, command: Sequence[str]) -> dict[str, Any]:
        """Runs the command of a part for a limited time; returns how it ended, and its results."""
        limit = min(LIMIT, max(1.0, self._end - time.time()))
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "measured.json"
            script, *options = command
            flag = () if script.startswith("gpu/") else ("--out",)
            words = [sys.executable, str(BENCHMARKS / script), *options, *flag, str(out)]
            start = time.monotonic()
            ended = run_limited(words, limit, self._say, build_environment(part, self._settings.dry))
            record: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - start, 1)}
            if out.exists():
                record["measured"] = read_json(out)
        return record


def summarise(measured: PartResults, runner: PartRunner, say: Callable[[str], None]) -> None:
    """Prints the figures of all parts, and the parts that are not done."""
    for line in format_figures(measured.parts):
        say(line)
    say(f"kept in {measured.path}")
    for name in runner.bad:
        say(f"{name} {measured.parts[name]['ended']}; once more: make gpu PARTS={name}")
    if runner.later:
        say(f"left for the next time: {', '.join(runner.later)}; the same command goes on with them")


def keep(measured: PartResults) -> Path:
    """Copies the results of a GPU to benchmarks/results."""
    if not measured.parts:
        raise UserError(f"{measured.folder}: has no results of a GPU to keep; run make gpu first")
    setup = measured.setup
    about = {name: value for name, value in setup.items() if not isinstance(value, dict)}  # for a line of docs/
    results = {"format": FORMAT, "benchmark": "gpu", "environment": about, **measured.content}
    return write_results(RESULTS / f"gpu-{setup.get('hardware', 'unknown')}.json", results)


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that no part outlives this process
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda heard, _: sys.exit(128 + heard))
    measured = PartResults(settings.folder)
    if settings.do == "keep":
        console.print(f"kept in {keep(measured)}")
        return 0
    if settings.do == "list":
        console.print("\n".join(f"{part.name:22} {part.what}" for part in load_parts()))
        return 0
    chosen = choose(load_parts(), settings.parts)
    measured.folder.mkdir(parents=True, exist_ok=True)
    with (measured.folder / LOG).open("a") as log:

        def say(line: str) -> None:
            console.print(line, markup=False)
            log.write(line + "\n")
            log.flush()

        runner = PartRunner(settings, measured, say)
        runner.run(chosen)
        summarise(measured, runner, say)
    measured.copy()
    return Code.MISTAKE if runner.bad else Code.STOPPED if runner.later else Code.DONE


if __name__ == "__main__":
    run_command(GpuRun, measure, "gpu")
