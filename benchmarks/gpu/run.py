#!/usr/bin/env python3
"""Runs the parts of `make gpu`, writes the results of each as soon as it ends, and prints which goals were met.

    python benchmarks/gpu/run.py --out build/gpu --parts tests throughput
    python benchmarks/gpu/run.py --out build/gpu --minutes 9
    python benchmarks/gpu/run.py --out build/gpu --keep

Each part is a process with a time limit. `results.json` in the folder has the results of all parts, `log.txt` their
output. A part that is done is not run again, unless --again is given or the GPU, torch or commit has changed. With
--minutes, no part is started that needs more than is left. The exit code is 0 if all parts are done, whatever the
goals, 1 if one failed or ran out of time, 75 if some are left for the next time, 2 for a mistake in the command.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rich.console import Console

from benchmarks.gpu.bare_machine import hide_packages
from benchmarks.gpu.goals import format_goals
from benchmarks.gpu.part_results import LOG, RESULTS_FILE, PartResults, copy_earlier_results
from benchmarks.gpu.parts import FIRST, SETUP, SHARDS, SMOKE, GpuPart, build_parts, choose
from benchmarks.measure import FORMAT, RESULTS, run_command, write_results
from benchmarks.processes import PATIENCE, end_group, pass_on, start
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json

BENCHMARKS = Path(__file__).parent.parent
MEANT_FOR = "H200"
ENDING = 15.0
"""Seconds at the end of --minutes that are reserved for ending a part and writing its results."""
Ended = Literal["done", "failed", "ran out of time"]


@dataclass(frozen=True)
class GpuRun:
    """Measures on a GPU, part by part."""

    out: Path = Path("build/gpu")
    """Folder for the results."""
    parts: tuple[str, ...] = ()
    """Names of parts, or prefixes of names (default: all)."""
    again: bool = False
    """Run finished parts again."""
    dry: bool = False
    """Run all parts on a CPU with a tiny model."""
    limit: float = 480.0
    """Time limit of a part, in seconds."""
    minutes: float | None = None
    """Start no part that cannot end within this time (default: no limit)."""
    since: float | None = None
    """Start of the minutes, in seconds since 1970 (default: now)."""
    earlier: Path | None = None
    """Results of an earlier machine to continue from, or their folder."""
    copies: Path | None = None
    """Another folder, which gets copies of the results after each part."""
    shards: Path = Path("build/gpu-shards")
    """Folder of shards, which is made if it is missing."""
    list: bool = False
    """List the parts."""
    keep: bool = False
    """Copy the results into benchmarks/results, and run nothing."""


def run_limited(
    command: Sequence[str], limit: float, say: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> Ended:
    """Runs a command for a limited time, then ends all of its processes. `say` gets its lines."""
    process = start(command, environment)
    reader = threading.Thread(target=pass_on, args=(process, say), daemon=True)
    reader.start()
    try:
        return "failed" if process.wait(limit) else "done"
    except subprocess.TimeoutExpired:
        return "ran out of time"
    finally:
        end_group(process)
        reader.join(PATIENCE)


def run_part(part: GpuPart, settings: GpuRun, limit: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs a part for at most `limit` seconds; returns how it ended, and its results."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if settings.dry:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        if part.name != SHARDS:  # shards may be made elsewhere
            environment = hide_packages(environment)
        environment |= (
            {} if part.name == SMOKE else {"TORCHDYNAMO_DISABLE": "1"}
        )  # compilation is tried in one part only
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "measured.json"
        script, *options = part.command
        command = [sys.executable, str(BENCHMARKS / script), *options, "--out", str(out)]
        start = time.monotonic()
        record: dict[str, Any] = {"ended": run_limited(command, limit, say, environment)}
        record["seconds"] = round(time.monotonic() - start, 1)
        if out.exists():
            record["measured"] = read_json(out)
    return record


class UnfinishedParts(NamedTuple):
    """Names of parts that are not done."""

    bad: list[str]
    """Failed, or out of time."""
    later: list[str]
    """Not started, for lack of time."""


def find_end(settings: GpuRun) -> float:
    """Returns the time at which the minutes for parts are over."""
    begun = time.time() if settings.since is None else settings.since
    return math.inf if settings.minutes is None else begun + 60 * settings.minutes - ENDING


def run_parts(
    parts: Sequence[GpuPart], measured: PartResults, settings: GpuRun, say: Callable[[str], None]
) -> UnfinishedParts:
    """Runs the parts that are not done; returns those that remain."""
    bad: list[str] = []
    later: list[str] = []
    made: dict[tuple[str, ...], dict[str, Any]] = {}
    end = find_end(settings)
    for part in parts:
        if measured.is_done(part) and not settings.again:
            say(f"== {part.name}: done already")
            continue
        lacking = part.lacks(measured.missing())
        if lacking:
            say(f"== {part.name}: left out, for want of {', '.join(lacking)}")
            continue
        if part.name not in FIRST and end - time.time() < 60 * part.minutes:
            say(f"== {part.name}: left for the next time: it takes {part.minutes:g} minutes, about")
            later.append(part.name)
            continue
        say(f"== {part.name}: {part.what}")
        if part.command in made:  # in a dry run, several parts have the same tiny model
            measured.add(part, made[part.command])
            say(f"== {part.name}: the same command as before")
            continue
        record = run_part(part, settings, min(settings.limit, max(1.0, end - time.time())), say)
        made[part.command] = record
        if part.name == SETUP and "measured" in record and measured.set_others_aside(record["measured"]):
            say("another GPU, torch or commit than that of the results: they are set aside, and all is measured anew")
        measured.add(part, record)
        say(f"== {part.name}: {record['ended']} after {record['seconds']} s")
        if record["ended"] != "done":
            bad.append(part.name)
            if part.name in FIRST:  # all others need it
                break
    return UnfinishedParts(bad, later)


def summarise(measured: PartResults, left: UnfinishedParts, say: Callable[[str], None]) -> None:
    """Prints how the goals were met, and the parts that are not done."""
    for line in format_goals(measured.parts, measured.content["dry"]):
        say(line)
    gpu = measured.parts.get(SETUP, {}).get("measured", {}).get("gpu")
    if gpu and MEANT_FOR not in gpu:
        say(f"the goals are for one {MEANT_FOR}; this is {gpu}")
    say(f"kept in {measured.path}")
    for name in left.bad:
        say(f"{name} {measured.parts[name]['ended']}; once more: make gpu PARTS={name}")
    if left.later:
        say(f"left for the next time: {', '.join(left.later)}; the same command goes on with them")


def keep(folder: Path) -> Path:
    """Copies the results of a GPU to benchmarks/results."""
    path = folder / RESULTS_FILE
    content: dict[str, Any] = read_json(path) if path.exists() else {"dry": True}
    if content["dry"]:
        raise UserError(f"{folder}: has no results of a GPU to keep; run make gpu there first")
    setup = content["parts"].get(SETUP, {}).get("measured", {})
    about = {name: value for name, value in setup.items() if not isinstance(value, dict)}  # for a line of docs/
    results = {"format": FORMAT, "benchmark": "gpu", "environment": about, **content}
    return write_results(RESULTS / f"gpu-{setup.get('hardware', 'unknown')}.json", results)


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that no part outlives this process
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
    copy_earlier_results(settings.earlier, settings.out)
    measured = PartResults(settings.out, settings.dry, settings.copies)
    with (settings.out / LOG).open("a") as log:

        def say(line: str) -> None:
            console.print(line, markup=False)
            log.write(line + "\n")
            log.flush()

        left = run_parts(chosen, measured, settings, say)
        summarise(measured, left, say)
    measured.copy()
    return Code.MISTAKE if left.bad else Code.STOPPED if left.later else Code.DONE


if __name__ == "__main__":
    run_command(GpuRun, measure)
