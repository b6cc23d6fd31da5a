"""What docs/gpu.md tells to type reaches the scripts as it says."""

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import tyro
from conftest import ROOT

from benchmarks.gpu.run import GpuRun
from benchmarks.gpu.tables import GpuTables
from benchmarks.gpu.wheels import Wheels

HERE = Path("build/gpu")
WHEELS = Path("build/gpu-wheels")
NOW = 1_000.0
"""Stands for the time at which make begins."""
MEANT: dict[str, GpuRun | GpuTables | Wheels] = {
    "make gpu": GpuRun(HERE),
    "make gpu DRY=1": GpuRun(Path("build/gpu-dry"), dry=True),
    "make gpu PYTHON=/usr/bin/python3.12": GpuRun(HERE),
    "make gpu MINUTES=9": GpuRun(HERE, minutes=9, since=NOW),
    "make gpu MINUTES=9 EARLIER=results.json": GpuRun(HERE, minutes=9, since=NOW, earlier=Path("results.json")),
    'make gpu PARTS="tests peer"': GpuRun(HERE, parts=("tests", "peer")),
    "make gpu PARTS=profile AGAIN=1": GpuRun(HERE, parts=("profile",), again=True),
    "make gpu OUT=/mnt/results": GpuRun(HERE, copies=Path("/mnt/results")),
    "make gpu-parts": GpuRun(HERE, list=True),
    "make gpu-keep": GpuRun(HERE, keep=True),
    "make gpu-text": GpuTables("pack"),
    "make gpu-tables": GpuTables("run", minutes=9),
    "make gpu-wheels": Wheels(WHEELS),
    'make gpu-wheels PYTHON_VERSION=3.11 HAS="torch"': Wheels(WHEELS, python="3.11", has=("torch",)),
}

SCRIPTS = {GpuRun: "run", GpuTables: "tables", Wheels: "wheels"}


def lines_of(command: str) -> list[list[str]]:
    """The commands that make would run, in a tree where nothing is installed."""
    make, *words = shlex.split(command)
    asked = [make, "--dry-run", "--always-make", "--no-print-directory", *words]
    done = subprocess.run(
        asked, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_all_commands_of_the_page_are_known() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    typed = [line.partition("#")[0].strip() for line in re.findall(r"^\$ (make .*)$", page, re.MULTILINE)]
    assert {*typed, *re.findall(r"`(make gpu \w+=\S+?)`", page)} == MEANT.keys()


@pytest.mark.parametrize("command", MEANT)
def test_a_command_of_the_page_does_what_it_says(command: str) -> None:
    meant = MEANT[command]
    script = f"benchmarks/gpu/{SCRIPTS[type(meant)]}.py"
    [found] = [line[line.index(script) + 1 :] for line in lines_of(command) if script in line]
    if "--since" in found:
        assert abs(float(found[found.index("--since") + 1]) - time.time()) < 60
        found[found.index("--since") + 1] = str(NOW)
    assert tyro.cli(type(meant), args=found, config=(tyro.conf.FlagCreatePairsOff,)) == meant


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3.12"])
def test_the_environment_is_made_by_the_python_that_is_named(python: str) -> None:
    [line] = [line for line in lines_of(f"make gpu PYTHON={python}") if "benchmarks/gpu/install.py" in line]
    assert line[2:] == [python, "benchmarks/gpu/install.py", "build/gpu-venv", "build/gpu-wheels"]
