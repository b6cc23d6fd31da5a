"""cluster/offline.sh: an environment where there is no network, from wheels that were gathered where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.registry import copy_project, scratch, without_pythons_paths

SCRIPT = ROOT / "cluster" / "offline.sh"


def fails(folder: Path, *arguments: str, **variables: str) -> str:
    """What the script says where it cannot begin."""
    environment = {**os.environ, "WHEELS": str(folder / "wheels"), "PYTHON": sys.executable, **variables}
    done = subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert done.stdout == ""
    return done.stderr.splitlines()[-1]


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("step", [(), ("install",)])
def test_a_missing_or_old_python_is_named(tmp_path: Path, step: tuple[str, ...]) -> None:
    assert "python9 is no Python from 3.10 on: load one" in fails(tmp_path, *step, PYTHON="python9")
    old = write_program(tmp_path / "python3.9", "echo 3.9; exit 1")
    assert "python3.9 is no Python from 3.10 on" in fails(tmp_path, *step, PYTHON=str(old))
    assert not (tmp_path / "wheels").exists()


@pytest.mark.parametrize("step", [(), ("install",)])
def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path, step: tuple[str, ...]) -> None:
    bare = write_program(tmp_path / "bare", f'[ "$1" != -m ] && exec {sys.executable} "$@"; exit 1')
    assert fails(tmp_path, *step, PYTHON=str(bare)) == f"error: {bare} has no pip: {bare} -m ensurepip --user"


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "df", "echo; echo disk 9 9 3145728 99% /")
    full = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    told = "has 3 GB free of 7 that are needed: make room, or take another folder:"
    assert fails(tmp_path, **full) == f"error: {tmp_path / 'wheels'} {told} WHEELS=..."
    assert [*(tmp_path / "wheels").iterdir()] == []
    (tmp_path / "wheels" / "torch-2-py3-none-any.whl").touch()
    venv = tmp_path / "venv"
    assert fails(tmp_path, "install", **full, VENV=str(venv)) == f"error: {venv} {told} VENV=..."


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    assert "is empty: cluster/offline.sh, where there is a network" in fails(tmp_path, "install")
    assert "not 'instal'" in fails(tmp_path, "instal")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_machine_without_a_network_gets_all_it_needs() -> None:
    cut = ["unshare", "--net"]
    if os.geteuid() != 0 or shutil.which(cut[0]) is None:
        pytest.skip("cutting the network off is root's to do, with unshare")
    with scratch() as folder:
        project = copy_project(folder / "cloze")
        here = {**without_pythons_paths(), "PYTHON": sys.executable, "CPU": "1"}

        def run(*command: str | Path, **more: str) -> str:
            variables = {**here, **more}
            done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        for _ in range(2):  # the second time is as after an interruption
            last = run("cluster/offline.sh").splitlines()[-1]
            assert re.fullmatch(rf"\d+ wheels for Python 3\.\d+: \d+M\s+{project}/wheels", last)
        alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
        run(*cut, "cluster/offline.sh", "install", **alone)
        python = project / ".venv" / "bin" / "python"
        assert "usage: shard.py" in run(*cut, python, "data_prep/shard.py", "--help")
        assert "4.4M parameters" in run(*cut, python, "pretraining/train.py", "--check", "--recipe", "demo")
        found = run(*cut, python, "-c", "import pretraining, torch; print(pretraining.__path__[0], torch.version.cuda)")
        assert found == f"{project}/pretraining None\n"
