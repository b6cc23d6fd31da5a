"""Functions of all benchmarks: reading the command, and writing results with the environment."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from data_prep.common.errors import UserError, quote
from data_prep.common.files import is_stream, read_json, replacing, sha256
from data_prep.common.flags import read_flags
from data_prep.common.terminal import open_console, run_curable

Settings = TypeVar("Settings")


def find_data_folder() -> Path:
    """Returns the folder that CLOZE_DATA names, by default data/."""
    return Path(os.environ.get("CLOZE_DATA", "data"))


ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SHARD = ROOT / "data_prep" / "shard.py"
COMMIT = ROOT / "build" / "gpu-wheels" / "commit.txt"
"""The commit and the code digest of a tree that is copied to a machine without git, or without the history."""
CODE = ("data_prep", "pretraining", "finetuning", "benchmarks")
MEASURED = (".py", ".cpp", ".h", ".toml")
"""Endings of the files on which results depend."""
PARTIAL = "-partial"
"""Ending of the name of a file that lacks contests or sides which the kept results have."""
FORMAT = 2
"""The format of JSON files; it changes if older readers would misread newer files."""
INSTRUCTION_SETS = {
    "amx_bf16": "amx",
    "avx512_bf16": "avx512-bf16",
    "avx512f": "avx512",
    "avx2": "avx2",
    "sve": "sve",
    "asimd": "neon",
}
"""Instruction sets for multiplication, the fastest first: Linux's names, and ours."""
LIMITS = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CXX": "g++ -march=x86-64-v3",
}
"""Variables that together limit oneDNN, PyTorch, MKL and our kernels to AVX2."""


def describe_run() -> dict[str, str]:
    """Describes when and how a part of the results was measured, for files with parts of several days."""
    found = describe_environment(["torch"])
    return {name: found[name] for name in ("date", "commit", "command", "torch")}


def describe_environment(libraries: Sequence[str]) -> dict[str, Any]:
    """Describes the command, the commit, the hardware with its instruction sets, versions, and with torch the GPU."""
    script, *options = sys.argv
    own, with_gpu = Path(script).resolve(), "torch" in libraries
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["python", str(own.relative_to(ROOT)) if own.is_relative_to(ROOT) else own.name, *options]),
        "commit": find_commit(),
        "hardware": name_hardware(with_gpu),
        "processor": _cpu_line("model name") or platform.machine(),
        "instruction_sets": list_instruction_sets(),
        **({"limits": LIMITS} if is_limited() else {}),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: _version(name) for name in libraries},
        **(_gpu() if with_gpu else {}),
    }


def name_hardware(with_gpu: bool = True) -> str:
    """Names the kind of hardware, such as avx512-bf16-2-cores or nvidia-h100-80gb-hbm3."""
    gpu = _gpu().get("gpu") if with_gpu else None
    if gpu:
        return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return f"{next(iter(list_instruction_sets()), platform.machine().lower())}-{len(os.sched_getaffinity(0))}-cores"


def list_instruction_sets() -> list[str]:
    """Lists the processor's instruction sets for multiplication, the fastest first; AVX2 alone if it is limited."""
    flags = (_cpu_line("flags") or _cpu_line("Features")).split()
    return ["avx2"] if is_limited() else [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]


def is_limited() -> bool:
    """Whether variables limit the processor to AVX2. Raises UserError for other limits, which results do not name."""
    *libraries, _ = LIMITS
    given = {name: os.environ[name] for name in libraries if name in os.environ}
    if given and LIMITS.items() - os.environ.items():
        wanted = " ".join(f"{name}={quote(value)}" for name, value in LIMITS.items())
        raise UserError(f"{', '.join(given)}: results have no name for this limit; unset it, or give all of {wanted}")
    return bool(given)


def note_commit() -> None:
    """Notes the commit beside the wheels for a machine that gets a copy of this tree."""
    COMMIT.unlink(missing_ok=True)
    COMMIT.write_text(f"{find_commit()} {compute_code_digest()}\n")


def find_commit() -> str:
    """Returns the commit that is measured, with + if files have changed since. If the code equals that for which wheels
    were gathered, it is their commit: the machine may have no checkout, or one without the history."""
    git = ["git", "-C", str(ROOT)]
    questions = ("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", *(f"*{each}" for each in MEASURED))
    gathered, _, digest = COMMIT.read_text().strip().partition(" ") if COMMIT.is_file() else ("", "", "")
    if digest and digest == (now := compute_code_digest()):
        return gathered
    try:
        head, changes = (subprocess.check_output([*git, *asked], stderr=subprocess.DEVNULL) for asked in questions)
    except (OSError, subprocess.CalledProcessError):
        return f"{gathered}+{now[:7]}" if digest else gathered  # so that different changes differ
    return head.decode().strip() + ("+" if changes.strip() else "")


def compute_code_digest() -> str:
    """Computes the digest of all code that can be measured."""
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in MEASURED)
    lines = [f"{path.relative_to(ROOT)} {sha256(path)}" for path in sorted(paths)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


def _gpu() -> dict[str, Any]:
    import torch  # preparing data needs none

    if not torch.cuda.is_available():
        return {}
    gpu = torch.cuda.get_device_properties(0)
    return {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}


@cache
def sample_gpu() -> list[tuple[float, ...]]:
    """Returns a list that gets the watts and MHz of the GPU every 100 ms from now on, by nvidia-smi if it is there."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    what = ("--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "--loop-ms=100")
    command, samples = ["nvidia-smi", f"--id={gpu}", *what], list[tuple[float, ...]]()

    def read() -> None:
        with suppress(OSError), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            atexit.register(process.wait)  # as the second, so that no other process has to reap it
            atexit.register(process.kill)
            for line in process.stdout or ():
                with suppress(ValueError):  # a GPU may not say what its power is
                    samples.append(tuple(map(float, line.split(","))))

    threading.Thread(target=read, daemon=True).start()
    return samples


def summarise_samples(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the medians of watts and MHz, if there are any."""
    return {name: median(each) for name, each in zip(("watts", "mhz"), zip(*samples, strict=True), strict=False)}


def _cpu_line(name: str) -> str:
    """Reads an entry of /proc/cpuinfo; empty if it is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def write_results(path: Path, results: dict[str, Any], replaces: bool = False) -> Path:
    """Writes the numbers into a JSON file, or beside it if they lack what it has and do not replace it, or if it is no
    file of this benchmark; returns the path."""
    if lost := _find_lost(path, results, replaces):
        own = path.with_name(f"{path.stem}{PARTIAL}{path.suffix}")
        print(f"{path}: stays as it is, for it has {lost}, which is not measured here; kept in {own}", file=sys.stderr)
        path = own
    with replacing(path) as file:
        file.write((json.dumps(results, indent=1) + "\n").encode())
    return path


def _find_lost(path: Path, results: Mapping[str, Any], replaces: bool = False) -> str:
    """Names what a file would lose to these numbers: contests, sides, rows of lists, or all if it belongs to another
    benchmark."""
    if is_stream(path) or not path.exists() or not path.stat().st_size:
        return ""
    try:
        before = json.loads(path.read_bytes())
    except ValueError:
        return "something else than results"
    if not isinstance(before, dict) or before.get("benchmark") != results.get("benchmark"):
        return "something else than results of this benchmark"
    return "" if replaces else ", ".join(sorted({*_list_parts(before)} - {*_list_parts(results)}))


def _list_parts(found: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the parts of results that could be lost: keys of the file, sides of contests, and rows of lists."""
    for name, each in found.items():
        if not place:
            yield name
        if name == "sides":
            yield from (f"{side} ({', '.join(place)})" for side in each)
        elif isinstance(each, list) and any(isinstance(row, Mapping) for row in each):
            yield from (f"row {number} of {', '.join((*place, name))}" for number in range(1, len(each) + 1))
        elif isinstance(each, Mapping):
            yield from _list_parts(each, (*place, name))


class ResultsFile:
    """The results file of a benchmark, written after each part, since parts take minutes."""

    def __init__(self, benchmark: str, libraries: Sequence[str], out: Path | None) -> None:
        self._benchmark, self._libraries = benchmark, libraries
        self.path = out or RESULTS / f"{benchmark}-{name_hardware('torch' in libraries)}.json"

    @cached_property
    def earlier(self) -> dict[str, Any]:
        """The content of earlier runs. Raises UserError if the file is not a results file."""
        found = read_results(self.path) if self.path.is_file() else {}
        return {name: each for name, each in found.items() if name not in ("format", "benchmark", "environment")}

    def keep(self, found: Mapping[str, Any], replaces: bool = False) -> Path:
        """Writes results, in place of any earlier ones if they replace them; returns the path of the file."""
        about = {"benchmark": self._benchmark, "environment": describe_environment(self._libraries)}
        return write_results(self.path, {"format": FORMAT, **about, **found}, replaces)


def read_results(path: Path) -> dict[str, Any]:
    """Reads a results file. Raises UserError if it is none, or has another format."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT or not {"benchmark", "environment"} <= set(found):
        raise UserError(f"{path}: no results in format {FORMAT}; remove it, and measure again")
    return found


def run_command(
    kind: type[Settings], do: Callable[[Settings, Console], int | None], page: str = "measurements"
) -> NoReturn:
    """Reads the command line of an entry, runs it, and ends with its exit code; its help names a page of docs/."""
    settings = read_flags(kind, sys.argv[1:], Path(sys.argv[0]).name, page)
    sys.exit(run_curable(lambda: do(settings, open_console(soft_wrap=True))))
