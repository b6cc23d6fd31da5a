"""What docs/gpu.md tells to type reaches the scripts as it says."""

import itertools
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
from benchmarks.gpu.wheels import Wheels
from benchmarks.reproduce import Reproduce

UNTIL = 1_000.0
"""Stands for the time at which the minutes are over."""
MEANT: dict[str, GpuRun | Reproduce | Wheels] = {
    "make gpu": GpuRun(),
    "make gpu DRY=1": GpuRun(dry=True),
    "make gpu PYTHON=/usr/bin/python3.12": GpuRun(),
    "make gpu MINUTES=9": GpuRun(until=UNTIL),
    'make gpu PARTS="tests peer"': GpuRun(parts=("tests", "peer")),
    "make gpu PARTS=profile AGAIN=1": GpuRun(parts=("profile",), again=True),
    "make gpu OUT=/mnt/results": GpuRun(),
    "make gpu-parts": GpuRun("list"),
    "make gpu-keep": GpuRun("keep"),
    "make gpu-tables": Reproduce("table5", "gpu", out=Path("build/gpu-tables/made")),
    "make gpu-wheels": Wheels(),
    'make gpu-wheels PYTHON_VERSION=3.11 HAS="torch"': Wheels(python="3.11", has=("torch",)),
}
UNREAD = {"make gpu-text"}
"""Commands that are no script of ours."""
SCRIPTS = {GpuRun: "gpu/run", Reproduce: "reproduce", Wheels: "gpu/wheels"}


def lines_of(command: str) -> list[list[str]]:
    """The commands that make would run, in a tree where nothing is installed."""
    make, *words = shlex.split(command)
    asked = [make, "--dry-run", "--always-make", "--no-print-directory", *words]
    done = subprocess.run(
        asked, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.replace("\\\n", "").splitlines()]


def test_all_commands_of_the_page_are_known() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    typed = [line.partition("#")[0].strip() for line in re.findall(r"^\$ (make .*)$", page, re.MULTILINE)]
    assert {*typed, *re.findall(r"`(make gpu \w+=\S+?)`", page)} == MEANT.keys() | UNREAD


@pytest.mark.parametrize("command", MEANT)
def test_a_command_of_the_page_does_what_it_says(command: str) -> None:
    meant = MEANT[command]
    script = f"benchmarks/{SCRIPTS[type(meant)]}.py"
    [found] = [line[line.index(script) + 1 :] for line in lines_of(command) if script in line]
    found = [*itertools.takewhile(lambda word: word != "||", found)]
    if "--until" in found:
        assert abs(float(found[-1]) - time.time() - 9 * 60) < 60
        found[-1] = str(UNTIL)
    assert tyro.cli(type(meant), args=found, config=(tyro.conf.FlagCreatePairsOff,)) == meant


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3.12"])
def test_the_environment_is_made_by_the_python_that_is_named(python: str) -> None:
    [line] = [line for line in lines_of(f"make gpu PYTHON={python}") if "benchmarks/gpu/install.py" in line]
    assert line[2:] == [python, "benchmarks/gpu/install.py", "build/gpu-venv", "build/gpu-wheels"]
