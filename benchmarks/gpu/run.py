#!/usr/bin/env python3
"""Measures on a GPU part by part, and writes the results of each as soon as it ends.

    python benchmarks/gpu/run.py --parts tests peer
    python benchmarks/gpu/run.py list
    python benchmarks/gpu/run.py keep

All parts run in one process, which loads all modules once. If it dies, as by a fault of the GPU, another one goes on
with the next part. `build/gpu/results.json` has the results of all parts, `log.txt` their output; the folder
that the variable OUT names gets copies. A part that is done is not run again, unless --again is given or the GPU, torch
or commit has changed. With --until, no part is started that needs more time than is left. The exit code is 0 if all
parts are done, 1 if one failed, 75 if some are left for the next time, 2 for a mistake in the command.
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
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks.measure import FORMAT, RESULTS, ROOT, run_command, write_results
from benchmarks.processes import Child
from data_prep.common.codes import Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json

WORKER = Path(__file__).with_name("worker.py")
OUT, DRY = ROOT / "build/gpu", ROOT / "build/gpu-dry"
"""Folders of the results."""
FOUND, LOG, PROFILE = "results.json", "log.txt", "profile"
PARTIAL = "running.json"
"""What a benchmark has measured so far."""
SINCE = "CLOZE_GPU_SINCE"
"""The variable by which a worker gets the time at which all workers began."""
BEGINNING = 120.0
"""Seconds that a worker has until a part begins or ends: it loads all modules first."""
ENDING = 10.0
"""Seconds before --until that are reserved for ending a part and writing its results."""
BROKEN = 70
"""The exit code of a worker whose GPU fails all that is asked of it."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}


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
    since: tyro.conf.Suppress[float] = field(default_factory=lambda: float(os.environ.get(SINCE, math.inf)))
    """(Worker only) Skip parts that began after this time."""

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return DRY if self.dry else OUT


def read_state(folder: Path) -> dict[str, Any]:
    """Reads the results of all parts, and which part is running."""
    path = folder / FOUND
    return dict(read_json(path)) if path.exists() else {"parts": {}}


def copy_results(folder: Path) -> None:
    """Copies the results to the folder that the variable OUT names, if there is one: three files."""
    copies = Path(os.environ.get("OUT") or folder)
    if copies.resolve() == folder.resolve():
        return
    copies.mkdir(parents=True, exist_ok=True)
    if (folder / PROFILE).is_dir():
        shutil.make_archive(str(copies / PROFILE), "gztar", folder, PROFILE)
    for name in (FOUND, LOG):
        if (folder / name).exists():
            shutil.copyfile(folder / name, copies / name)


def wait_for(child: Child, folder: Path, end: float) -> int | None:
    """Waits for a worker, copies the results of each part; returns its exit code; None if a part takes too long."""
    code, known, limit = None, dict[str, Any](), time.time() + BEGINNING
    while code is None and time.time() < min(end, limit):
        code, state = child.wait(1.0), read_state(folder)
        if state["parts"] != known:
            copy_results(folder)
            known, limit = state["parts"], time.time() + BEGINNING
        limit = state.get("running", {}).get("limit", limit)
    return code


def supervise(settings: GpuRun, say: Callable[[str], None]) -> int:
    """Runs workers until no part is left; returns the exit code."""
    folder, since, end = settings.folder, time.time(), settings.until - ENDING
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", SINCE: str(since), **(ON_CPU if settings.dry else {})}
    write_json(folder / FOUND, {name: each for name, each in read_state(folder).items() if name != "running"})
    while True:
        child = Child([sys.executable, str(WORKER), *sys.argv[1:]], say, environment)
        try:
            code = wait_for(child, folder, end)
        finally:
            child.end()
        state = read_state(folder)
        lost = state.pop("running", None)
        if lost is not None:
            lost["ended"] = "ran out of time" if code is None else f"ended its process with {code}"
            if (folder / PARTIAL).exists():
                lost["measured"] = read_json(folder / PARTIAL)
            state["parts"][lost.pop("name")] = lost
            write_json(folder / FOUND, state)
        if lost is None and code is None and time.time() < end:
            say(f"no part has begun for {BEGINNING:.0f} s")
        if (lost is None and code != BROKEN) or time.time() > end:
            break
    failed = [each for each in state["parts"].items() if each[1]["begun"] >= since and each[1]["ended"] != "done"]
    for name, part in failed:
        say(f"{name}: {part['ended']}; once more: make gpu PARTS={name}")
    return Code.MISTAKE if failed else Code.STOPPED if code is None else abs(code)


def keep(folder: Path) -> Path:
    """Copies the results of a GPU to benchmarks/results."""
    state = read_state(folder)
    if not state["parts"]:
        raise UserError(f"{folder}: has no results of a GPU to keep; run make gpu first")
    results = {"format": FORMAT, "benchmark": "gpu", **state}
    return write_results(RESULTS / f"gpu-{state['environment']['hardware']}.json", results)


def measure(settings: GpuRun, console: Console) -> int:
    """Runs the parts; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that no part outlives this process
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda heard, _: sys.exit(128 + heard))
    folder = settings.folder
    if settings.do == "keep":
        console.print(f"kept in {keep(folder)}")
        return Code.DONE
    if settings.do == "list":
        return subprocess.run([sys.executable, str(WORKER), *sys.argv[1:]], check=False).returncode
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("a", buffering=1) as log:

        def say(line: str) -> None:
            console.print(line, markup=False)
            log.write(line + "\n")

        code = supervise(settings, say)
        say(f"kept in {folder / FOUND}")
    copy_results(folder)
    return code


if __name__ == "__main__":
    run_command(GpuRun, measure, "gpu")
