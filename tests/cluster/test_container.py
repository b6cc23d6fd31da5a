"""cluster/container/: two recipes of one image, whose steps are those of install.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from support.registry import locked, scratch, without_pythons_paths

FOLDER = ROOT / "cluster" / "container"
INSTALL = FOLDER / "install.sh"


def lint(name: str, *files: Path) -> None:
    """Runs a linter of the `dev` extra."""
    program = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"no {name} here: pip install -e '.[dev]'")
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_has_no_faults() -> None:
    lint("hadolint", FOLDER / "Dockerfile")


def test_the_script_has_no_faults() -> None:
    assert os.access(INSTALL, os.X_OK)
    lint("shellcheck", INSTALL)


def test_both_recipes_make_the_same_image() -> None:
    docker, apptainer = ((FOLDER / name).read_text() for name in ("Dockerfile", "cloze.def"))
    base = re.search(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert base
    assert f"\nBootstrap: docker\nFrom: {base[1]}\n" in apptainer
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d+\.\d+", base[1])
    copied = re.findall(r"^COPY (\S+) (\S+/)$", docker, re.MULTILINE)
    assert [(name, f"{folder}{Path(name).name}") for name, folder in copied] == re.findall(
        r"^    (\S+) (/\S+)$", re.split(r"^%\w+$", apptainer, flags=re.MULTILINE)[1], re.MULTILINE
    )
    for name, _ in copied:
        assert (ROOT / name).exists()
    (step,) = re.findall(r"^RUN .*?(PIP_NO_CACHE_DIR=1 \S+)$", docker, re.MULTILINE)
    assert f"\n%post\n    {step}\n" in apptainer
    assert "PATH=/opt/cloze/bin:$" in docker.replace("{PATH}", "PATH")
    assert "export PATH=/opt/cloze/bin:$PATH" in apptainer


def test_an_image_without_cudas_compiler_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tmp_path / "bin"), "PREFIX": str(tmp_path / "cloze")}
    done = subprocess.run([INSTALL], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "error: no nvcc here: take an image with CUDA's compiler (devel), or CPU=1\n",
    )
    assert not (tmp_path / "cloze").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_environment_runs_the_project_from_the_working_directory() -> None:
    """The steps of the image, without CUDA and apex."""
    with scratch() as folder:
        (folder / "constraints").write_text(f"{locked('torch')}+cpu\n")
        prefix = folder / "opt"
        variables = without_pythons_paths() | {"CPU": "1", "PREFIX": str(prefix), "PYTHON": sys.executable}
        variables |= {"PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as the Dockerfile has it
        variables["PIP_CONSTRAINT"] = str(folder / "constraints")

        def run(command: str) -> str:
            words = command.split()
            done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}: {done.stdout + done.stderr}"
            return done.stdout

        assert run(str(INSTALL)) == f"torch {locked('torch').removeprefix('torch==')}+cpu\n"
        shard = f"data_prep/shard.py --docs {write_wiki(folder / 'wiki')} --out {folder / 'data'} --vocab-size 400"
        run(f"mpirun --oversubscribe -n 2 python3 {shard} --lengths 128 512 --duplicates 1")
        assert "4.4M parameters" in run("python3 pretraining/train.py --check --recipe demo")
        short = "--model.layers 1 --phases.0.steps 2 --phases.1.steps 1"
        run(f"python3 pretraining/train.py --recipe demo --data {folder / 'data'} --out {folder / 'run'} {short}")
        assert (folder / "run" / "export" / "model.safetensors").exists()
        for entry in ("run_glue", "run_squad", "run_swag", "run_ner", "run_task"):
            assert f"usage: {entry}.py" in run(f"python3 finetuning/{entry}.py --help")
