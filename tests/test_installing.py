"""The Makefile's own environment: a Python that will not do is told in a line, and a try that fails leaves no trace."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.commands import write_program

OLD = f"""exec {sys.executable} -S -c 'import runpy, sys
sys.version_info, sys.argv, sys.prefix = (3, 9, 18, "final", 0), sys.argv[1:], PREFIX
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """What make reads before anything is installed."""
    (tmp_path / "data_prep/common").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "data_prep/common/beginning.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(house: Path, *words: object) -> tuple[int, list[str]]:
    """The code of `make .venv/installed`, run apart from any other make, and what it says but for its own last line."""
    command = ["make", ".venv/installed", *map(str, words)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=house, env=alone, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]


def test_an_old_python_makes_no_environment(house: Path) -> None:
    old = write_program(house / "old", OLD.replace("PREFIX", "sys.prefix"))
    code, [said] = make(house, f"PYTHON={old}")
    assert code == 2
    assert "is Python 3.9, and this needs 3.10 or newer; make .venv/installed PYTHON=python3.12" in said
    assert not (house / ".venv").exists()


def test_an_environment_that_cannot_be_made_is_none(house: Path) -> None:
    """As on Debian without python3-venv, which makes a Python and no pip."""
    python = f'[ "$1" = -m ] || exec {sys.executable} "$@"\nmkdir -p .venv/bin && touch .venv/bin/python\nexit 1\n'
    code, _ = make(house, f"PYTHON={write_program(house / 'python', python)}")
    assert code == 2
    assert not (house / ".venv").exists()


@pytest.mark.parametrize("lacks", ["a newer Python", "pip"])
def test_an_environment_of_an_earlier_try_is_told(lacks: str, house: Path) -> None:
    text = OLD.replace("PREFIX", '".venv"')
    if lacks == "pip":
        text = text.replace("(3, 9,", "(3, 12,")
    write_program(house / ".venv/bin/python", text)
    code, [said] = make(house)
    assert code == 2
    assert "make clean-venv" in said
    assert ("has no package pip" if lacks == "pip" else "is Python 3.9") in said


def test_what_is_not_installed_is_not_marked(house: Path) -> None:
    write_program(house / ".venv/bin/python", '[ "$1" != -m ]\n')
    assert make(house) == (2, [])
    assert not (house / ".venv/installed").exists()
