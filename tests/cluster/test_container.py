"""Environments of nodes: cluster/container/, whose two recipes make one image, and cluster/offline.sh, which needs no
network but wheels that were gathered where there is one."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, write_wiki
from support.commands import write_program
from support.marks import slow

FOLDER = ROOT / "cluster" / "container"
INSTALL = FOLDER / "install.sh"
SCRIPTS = ("cluster/*.slurm", "cluster/*.sh", "docs/examples/*.sh")


def locked(name: str) -> str:
    """The line of requirements.lock for a package that has one version for all Pythons."""
    return next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith(f"{name}=="))


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for some gigabytes, which are gone afterwards; skips where pip reaches no torch for CPUs."""
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        wanted = [f"{locked('torch')}+cpu", locked("idna")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--no-deps"]
        pip += ["--quiet", "--ignore-installed", *wanted]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip reaches no registry with a torch for CPUs: {done.stderr.strip().splitlines()[-1]}")
        yield Path(folder)


def copy_project(folder: Path) -> Path:
    """The project as a user has it, without what was installed in its folder."""
    folder.mkdir()
    for name in ("data_prep", "pretraining", "finetuning", "benchmarks", "cluster"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def without_pythons_paths() -> dict[str, str]:
    """This environment, in which Python finds only what is installed."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(words: Sequence[str | Path], where: Path, variables: Mapping[str, str]) -> str:
    done = subprocess.run(words, cwd=where, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout + done.stderr}"
    return done.stdout


def refuse(words: Sequence[str | Path], variables: Mapping[str, str]) -> str:
    """What a script says where it cannot begin."""
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("linter", ["hadolint", slow("shellcheck")])
def test_scripts_and_the_dockerfile_have_no_faults(linter: str) -> None:
    """By linters of the `dev` extra; for aarch64 there is none."""
    program = shutil.which(linter, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"no {linter} here: pip install -e '.[dev]'")
    scripts = [INSTALL, *(path for place in SCRIPTS for path in sorted(ROOT.glob(place)))]
    files = ["-x", *scripts] if linter == "shellcheck" else [FOLDER / "Dockerfile"]
    run([program, *files], ROOT, os.environ)


def test_both_recipes_make_the_same_image() -> None:
    docker, apptainer = ((FOLDER / name).read_text() for name in ("Dockerfile", "cloze.def"))
    base = re.search(r"^ARG BASE=(\S+)$", docker, re.MULTILINE)
    assert base
    assert f"\nBootstrap: docker\nFrom: {base[1]}\n" in apptainer
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d+\.\d+", base[1])
    copied = re.findall(r"^COPY (\S+) (\S+/)$", docker, re.MULTILINE)
    files = re.findall(r"^    (\S+) (/\S+)$", re.split(r"(?m)^%\w+$", apptainer)[1], re.MULTILINE)
    assert [(name, f"{folder}{Path(name).name}") for name, folder in copied] == files
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
    told = "error: no nvcc here: take an image with CUDA's compiler (devel), or CPU=1"
    assert refuse([INSTALL], environment) == told
    assert not (tmp_path / "cloze").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_environment_runs_the_project_from_the_working_directory() -> None:
    """The steps of the image, without CUDA."""
    with scratch() as folder:
        (folder / "constraints").write_text(f"{locked('torch')}+cpu\n")
        prefix = folder / "opt"
        variables = without_pythons_paths() | {"CPU": "1", "PREFIX": str(prefix), "PYTHON": sys.executable}
        variables |= {"PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as the Dockerfile has it
        variables["PIP_CONSTRAINT"] = str(folder / "constraints")
        variables["PIP_NO_COMPILE"] = "0"  # as pip reads it: it compiles nothing, and what is loaded is compiled then

        def call(command: str) -> str:
            return run(command.split(), ROOT, variables)

        assert call(str(INSTALL)) == f"torch {locked('torch').removeprefix('torch==')}+cpu\n"
        shard = f"data_prep/shard.py --docs {write_wiki(folder / 'wiki')} --out {folder / 'data'} --vocab-size 400"
        call(f"mpirun --oversubscribe -n 2 python3 {shard} --lengths 128 512 --duplicates 1")
        short = "--model.layers 1 --phases.0.steps 1 --phases.1.steps 1"
        call(f"python3 pretraining/train.py --recipe demo --data {folder / 'data'} --out {folder / 'run'} {short}")
        assert (folder / "run" / "export" / "model.safetensors").exists()
        assert "usage: run_task.py" in call("python3 finetuning/run_task.py --help")


# cluster/offline.sh


SCRIPT = ROOT / "cluster" / "offline.sh"


def fails(folder: Path, *arguments: str, **variables: str) -> str:
    given = {**os.environ, "WHEELS": str(folder / "wheels"), "PYTHON": sys.executable, **variables}
    return refuse([SCRIPT, *arguments], given)


def test_a_python_that_will_not_do_is_named_with_the_cure(tmp_path: Path) -> None:
    old = write_program(tmp_path / "python3.9", "echo 3.9; exit 1")
    bare = write_program(tmp_path / "bare", f'[ "$1" != -m ] && exec {sys.executable} "$@"; exit 1')
    for step in ([], ["install"]):
        for python in ("python9", str(old)):
            assert f"{Path(python).name} is no Python from 3.10 on: load one" in fails(tmp_path, *step, PYTHON=python)
        cure = f"error: {bare} has no pip: {bare} -m ensurepip --user"
        assert fails(tmp_path, *step, PYTHON=str(bare)) == cure
    assert not (tmp_path / "wheels").exists()


def test_a_full_disk_is_told_before_anything_is_fetched_and_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    quick = write_program(tmp_path / "quick", f'[ "$1" = -m ] || exec {sys.executable} "$@"')  # it has a pip
    write_program(tmp_path / "bin" / "df", "echo; echo disk 9 9 3145728 99% /")
    full = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": str(quick)}
    assert "is empty: cluster/offline.sh, where there is a network" in fails(tmp_path, "install", **full)
    assert "not 'instal'" in fails(tmp_path, "instal", **full)
    told = "has 3 GB free of 7 that are needed: make room, or take another folder:"
    assert fails(tmp_path, **full) == f"error: {tmp_path / 'wheels'} {told} WHEELS=..."
    assert [*(tmp_path / "wheels").iterdir()] == []
    (tmp_path / "wheels" / "torch-2-py3-none-any.whl").touch()
    venv = tmp_path / "venv"
    assert fails(tmp_path, "install", **full, VENV=str(venv)) == f"error: {venv} {told} VENV=..."


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_machine_without_a_network_gets_all_it_needs() -> None:
    cut = ["unshare", "--net"]
    if os.geteuid() != 0 or shutil.which(cut[0]) is None:
        pytest.skip("cutting the network off is root's to do, with unshare")
    with scratch() as folder:
        project = copy_project(folder / "cloze")
        here = {**without_pythons_paths(), "PYTHON": sys.executable, "CPU": "1"}

        def call(*command: str | Path, **more: str) -> str:
            return run(command, project, {**here, **more})

        for _ in range(2):  # the second time is as after an interruption
            last = call("cluster/offline.sh").splitlines()[-1]
            assert re.fullmatch(rf"\d+ wheels for Python 3\.\d+: \d+M\s+{project}/wheels", last)
        alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_CACHE_DIR": "1"}
        call(*cut, "cluster/offline.sh", "install", **alone)
        python = project / ".venv" / "bin" / "python"
        assert "usage: shard.py" in call(*cut, python, "data_prep/shard.py", "--help")
        assert "4.4M parameters" in call(*cut, python, "pretraining/train.py", "--check", "--recipe", "demo")
        ask = "import pretraining, torch; print(pretraining.__path__[0], torch.version.cuda)"
        found = call(*cut, python, "-c", ask)
        assert found == f"{project}/pretraining None\n"
