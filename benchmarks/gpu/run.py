#!/usr/bin/env python3
"""Runs the parts of `make gpu`, keeps what each has measured as soon as it ends, and says which goals were met.

    python benchmarks/gpu/run.py --out build/gpu --parts tests throughput
    python benchmarks/gpu/run.py --out build/gpu --keep

Each part is a process with a limit. `results.json` in the folder has what all parts have measured, `log.txt` what they
said. A part that is done is not run again, unless --again is given or the GPU, torch or the commit is another one. The
exit code is 0 when all parts were done, whatever the goals, 1 when one failed or ran out of time, and 2 for a mistake
in the command.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from benchmarks.gpu.bare_machine import bare
from benchmarks.gpu.goals import goal_lines
from benchmarks.gpu.parts import FIRST, SETUP, SHARDS, GpuPart, build_parts, choose
from benchmarks.measure import FORMAT, RESULTS, run_command, write_results
from benchmarks.processes import PATIENCE, end_group, start
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

BENCHMARKS = Path(__file__).parent.parent
MEANT_FOR = "H200"
RESULTS_FILE, LOG = "results.json", "log.txt"
SUBJECT = ("gpu", "torch", "commit")
"""What all numbers depend on: where the setup finds another one, parts are measured anew."""
Ended = Literal["done", "failed", "ran out of time"]


@dataclass(frozen=True)
class GpuRun:
    """Measures on a GPU, part by part."""

    out: Path = Path("build/gpu")
    """Folder for the results."""
    parts: tuple[str, ...] = ()
    """Names of parts, or how they begin (default: all)."""
    again: bool = False
    """Run parts again that are done."""
    dry: bool = False
    """Go through everything on a CPU with a tiny model."""
    limit: float = 480.0
    """Seconds that a part may take."""
    shards: Path = Path("build/gpu-shards")
    """Folder of shards; made where it is missing."""
    list: bool = False
    """Say which parts there are."""
    keep: bool = False
    """Copy the results into benchmarks/results, and run nothing."""


class PartResults:
    """What the parts have measured, in a file that is whole after each of them."""

    def __init__(self, folder: Path, dry: bool):
        self.path = folder / RESULTS_FILE
        self.content: dict[str, Any] = read_json(self.path) if self.path.exists() else {"dry": dry, "parts": {}}
        self.parts: dict[str, Any] = self.content["parts"]
        if self.content["dry"] != dry:
            kind = "of a dry run" if self.content["dry"] else "of a GPU"
            raise UserError(f"{folder}: has results {kind}; give another folder")

    def is_done(self, part: GpuPart) -> bool:
        return part.name not in FIRST and self.parts.get(part.name, {}).get("ended") == "done"

    def add(self, part: GpuPart, record: dict[str, Any]) -> None:
        self.parts[part.name] = record
        write_json(self.path, self.content)

    def forget_others(self, setup: dict[str, Any]) -> bool:
        """Drops what was measured on another subject than what the setup has found; whether there was any."""
        subject = {name: setup.get(name) for name in SUBJECT}
        is_other: bool = self.content.get("subject", subject) != subject
        if is_other:
            self.parts.clear()
        self.content["subject"] = subject
        return is_other


def run_limited(
    command: Sequence[str], limit: float, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> Ended:
    """Runs a command for a limited time, and leaves no process of it behind. `say` gets its output, line by line."""
    process = start(command, environment)
    reader = threading.Thread(target=_pass_on, args=(process, say), daemon=True)
    reader.start()
    try:
        return "failed" if process.wait(limit) else "done"
    except subprocess.TimeoutExpired:
        return "ran out of time"
    finally:
        end_group(process)
        reader.join(PATIENCE)


def _pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        say(line.rstrip("\n"))


def run_part(part: GpuPart, settings: GpuRun, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs a part, and says how it ended and what it measured."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if settings.dry:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        environment = bare(environment) if part.name != SHARDS else environment  # shards may be made elsewhere
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "measured.json"
        script, *options = part.command
        command = [sys.executable, str(BENCHMARKS / script), *options, "--out", str(out)]
        start = time.monotonic()
        record: dict[str, Any] = {"ended": run_limited(command, settings.limit, say, environment)}
        record["seconds"] = round(time.monotonic() - start, 1)
        if out.exists():
            record["measured"] = read_json(out)
    return record


def run_parts(
    parts: Sequence[GpuPart], measured: PartResults, settings: GpuRun, say: Callable[[str], None]
) -> list[str]:
    """Runs the parts that are not done; returns the names of those that did not end well."""
    bad = []
    for part in parts:
        if measured.is_done(part) and not settings.again:
            say(f"== {part.name}: done already")
            continue
        say(f"== {part.name}: {part.what}")
        record = run_part(part, settings, say)
        if part.name == SETUP and "measured" in record and measured.forget_others(record["measured"]):
            say("another GPU, torch or commit than that of the results: all parts are measured anew")
        measured.add(part, record)
        say(f"== {part.name}: {record['ended']} after {record['seconds']} s")
        if record["ended"] != "done":
            bad.append(part.name)
            if part.name in FIRST:  # no other can do without
                break
    return bad


def summarise(measured: PartResults, bad: Sequence[str], say: Callable[[str], None]) -> None:
    """Says how the goals were met, and what did not end well."""
    for line in goal_lines(measured.parts, measured.content["dry"]):
        say(line)
    gpu = measured.parts.get(SETUP, {}).get("measured", {}).get("gpu")
    if gpu and MEANT_FOR not in gpu:
        say(f"the goals are for one {MEANT_FOR}; this is {gpu}")
    say(f"kept in {measured.path}")
    for name in bad:
        say(f"{name} {measured.parts[name]['ended']}; once more: make gpu PARTS={name}")


def keep(folder: Path) -> Path:
    """Copies the results of a GPU to where numbers are published from."""
    path = folder / RESULTS_FILE
    content: dict[str, Any] = read_json(path) if path.exists() else {"dry": True}
    if content["dry"]:
        raise UserError(f"{folder}: has no results of a GPU to keep; run make gpu there first")
    setup = content["parts"].get(SETUP, {}).get("measured", {})
    results = {"format": FORMAT, "benchmark": "gpu", "environment": setup, **content}
    return write_results(RESULTS / f"gpu-{setup.get('hardware', 'unknown')}.json", results)


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that a part does not outlive this
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda heard, _: sys.exit(128 + heard))
    if settings.keep:
        console.print(f"kept in {keep(settings.out)}")
        return 0
    parts = build_parts(settings.shards, settings.out, settings.dry)
    if settings.list:
        console.print("\n".join(f"{part.name:22} {part.what}" for part in parts))
        return 0
    chosen = choose(parts, settings.parts)
    settings.out.mkdir(parents=True, exist_ok=True)
    measured = PartResults(settings.out, settings.dry)
    with (settings.out / LOG).open("a") as log:

        def say(line: str) -> None:
            console.print(line, markup=False)
            log.write(line + "\n")
            log.flush()

        bad = run_parts(chosen, measured, settings, say)
        summarise(measured, bad, say)
    return 1 if bad else 0


if __name__ == "__main__":
    run_command(GpuRun, measure)
