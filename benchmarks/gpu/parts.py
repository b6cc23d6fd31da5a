#!/usr/bin/env python3
"""The parts of `make gpu`, and those of them that no benchmark has: setup, data and tests.

    python benchmarks/gpu/parts.py data --shards build/gpu-shards

Shards are made of the text in the folder that CLOZE_DATA names, or else of the demo corpus, which every machine has.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import importlib
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal
from xml.etree import ElementTree

import tyro
from rich.console import Console

from benchmarks.gpu.install import NEEDED, PREPARING
from benchmarks.measure import DATA, ROOT, environment, run_command, write_results
from benchmarks.texts import LENGTHS, make_shards
from data_prep.common.errors import UserError
from data_prep.shards import MANIFEST, Manifest

SETUP, SHARDS = "setup", "data"
FIRST = (SETUP, SHARDS)
"""What all others need: run each time, since a results folder may have come from another machine."""
CONTESTS = ("base-128-512", "large-128-256", "base-512-128", "large-512-64")
FILES = "wiki/AA/wiki_0*"
"""Real text for the shards: 5 MB, which are 12,000 sequences at 128."""
MODULES = {"pytest-timeout": "pytest_timeout"}
"""Packages whose modules are called otherwise."""


@dataclass(frozen=True)
class GpuPart:
    """A part of the measurement, in a process of its own."""

    name: str
    what: str
    command: tuple[str, ...]
    """A script in benchmarks/ with its options; `--out FILE` is added, for what it measures."""


def build_parts(shards: Path, folder: Path, dry: bool) -> list[GpuPart]:
    """All parts in their order. `dry` gives the same with a tiny model."""
    on_shards, own = ("--shards", str(shards)), "gpu/parts.py"

    def throughput(contest: str, *options: str) -> tuple[str, ...]:
        name = f"tiny-{contest.split('-')[1]}-4" if dry else contest
        return ("throughput.py", *on_shards, "--rounds", "1" if dry else "10", "--contests", name, *options)

    def speed_of(contest: str) -> str:
        return f"throughput-{contest.rpartition('-')[0]}"

    peer, profile = ("--peer", "transformers"), ("--peer", "none", "--profile", str(folder / "profile"))
    deterministic = ("--against", "cloze, deterministic")
    table = [
        (SETUP, "what is installed, and on what machine", (own, SETUP, *["--dry"] * dry)),
        (SHARDS, "shards to train on", (own, SHARDS, *on_shards)),
        ("tests", "the tests that need a GPU", (own, "tests")),
        *((speed_of(name), f"{name}, against transformers", throughput(name, *peer)) for name in CONTESTS),
        ("profile", "which kernels take the time of a step", throughput("large-128-256", *profile)),
        ("deterministic", "what the same bits each time cost", throughput("large-128-256", *deterministic)),
    ]
    return [GpuPart(*row) for row in table]


def choose(parts: Sequence[GpuPart], names: Sequence[str]) -> list[GpuPart]:
    """The parts of these names, or of names that begin so; all of them where none is given."""
    unknown = [name for name in names if not any(_is_named(part, name) for part in parts)]
    if unknown:
        there = ", ".join(part.name for part in parts)
        raise UserError(f"{', '.join(unknown)}: no part of this name; there is {there}")
    return [part for part in parts if not names or any(_is_named(part, name) for name in (*names, *FIRST))]


def _is_named(part: GpuPart, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}-")


@dataclass(frozen=True)
class OwnPart:
    """Does what the measurements of a GPU need besides."""

    part: tyro.conf.Positional[Literal["setup", "data", "tests"]]
    """setup: say what is installed, on what machine; data: make shards; tests: run those that need a GPU."""
    out: Path | None = None
    """File for what is found."""
    shards: Path = Path("build/gpu-shards")
    """Folder of the shards; nothing is made where there are some."""
    data: Path = DATA
    """Folder of real text with wiki/ and vocab.txt."""
    dry: bool = False
    """A machine without a GPU will do."""


def describe_machine(dry: bool) -> dict[str, Any]:
    """What decides the numbers besides the code; UserError where something is missing."""
    import torch

    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(MODULES.get(name, name))
        except ImportError as error:
            missing.append(f"{name}: {error}")
    if missing:
        raise UserError("\n".join([*missing, "make gpu installs them: rm -r build/gpu-venv, and start it again"]))
    found = {**environment(["torch", *NEEDED]), "cuda": torch.version.cuda, "dry": dry}
    if not dry and "gpu" not in found:
        raise UserError(f"torch {torch.__version__} finds no GPU: check nvidia-smi, or take make gpu DRY=1")
    return found


def ensure_shards(shards: Path, data: Path) -> dict[str, Any]:
    """Makes the shards where they are missing, and says what they are."""
    if not (shards / MANIFEST).exists():
        missing = [name for name in PREPARING if find_spec(name) is None]
        if missing:
            raise UserError(
                f"{shards}: is missing, and {', '.join(missing)} to make it\n"
                f"make gpu-wheels prepares it on a machine with a network"
            )
        if (data / "wiki").is_dir():
            make_shards(shards, "--docs", data / FILES, "--vocab", data / "vocab.txt", *LENGTHS)
        else:
            make_shards(shards, "--docs", "demo")
    manifest = Manifest.read(shards)
    size = sum(path.stat().st_size for path in shards.rglob("*") if path.is_file())
    return {"vocabulary": manifest.vocabulary_size, "fingerprint": manifest.fingerprint, "mib": round(size / 2**20, 1)}


def run_tests() -> tuple[int, dict[str, int]]:
    """Runs the tests that are marked `gpu`; returns pytest's exit code, and how they ended."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "--verbose", "-rs", f"--junitxml={report}", "-p", "no:cacheprovider"]
        options += ["--continue-on-collection-errors"]  # one file that cannot be read costs no other
        code = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False).returncode
        return code, count(report) if report.exists() else {}


def count(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by a report of pytest's."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    tests, errors, failures, skipped = (
        sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "errors", "failures", "skipped")
    )
    return {"passed": tests - errors - failures - skipped, "failed": errors + failures, "skipped": skipped}


def do_part(settings: OwnPart, console: Console) -> int:
    """Does a part, and says and keeps what was found; returns the exit code."""
    code, found = 0, {}
    if settings.part == SETUP:
        found = describe_machine(settings.dry)
    elif settings.part == SHARDS:
        found = ensure_shards(settings.shards, settings.data)
    else:
        code, found = run_tests()
    if found and settings.out is not None:
        write_results(settings.out, found)
    console.print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return code


if __name__ == "__main__":
    run_command(OwnPart, do_part)
