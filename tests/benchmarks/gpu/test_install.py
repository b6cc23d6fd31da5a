"""The environment of `make gpu` uses what a machine has installed, and never takes another torch."""

import io
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from rich.console import Console

from benchmarks.gpu import install
from benchmarks.gpu import wheels as gathering
from benchmarks.gpu.install import NEEDED, lock_versions
from benchmarks.gpu.wheels import Wheels, collect_requirements, prepare, select_locked


@pytest.mark.slow
def test_without_a_network_the_machines_packages_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Here the machine has all, so that an empty folder of wheels is enough; torch is its own, not a copy."""
    (tmp_path / "wheels").mkdir()
    assert install.main(tmp_path / "venv", tmp_path / "wheels") == 0
    assert f"is ready, with torch {version('torch')}" in capfd.readouterr().out
    ask = "import torch, tyro, benchmarks.gpu, sys; print(sys.prefix, torch.__file__, benchmarks.gpu.__path__[0])"
    python = tmp_path / "venv" / "bin" / "python"
    told = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path, env={})
    assert told.stdout.split() == [str(tmp_path / "venv"), torch.__file__, str(ROOT / "benchmarks" / "gpu")]


def test_a_wheel_that_is_missing_is_named_and_one_of_another_torch_not_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    files = {"METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n", "RECORD": ""}
    files["WHEEL"] = "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(tmp_path / "wheels" / "torch-99.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"torch-99.0.dist-info/{name}", text)
    monkeypatch.setattr(install, "NEEDED", ("torch>=99",))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # this machine may have constraints of its own
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    assert install.main(tmp_path / "venv", tmp_path / "wheels") == 2
    said = capfd.readouterr()
    assert "torch>=99" in said.err
    assert "make gpu-wheels HAS='torch' gathers all" in said.out


def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", install.__file__, str(tmp_path / "venv"), "wheels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "has no torch" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_python_without_the_venv_module_is_told_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "venv", None)
    assert install.main(tmp_path / "venv", tmp_path / "wheels") == 2
    [line] = capfd.readouterr().out.splitlines()
    assert "take another Python, or do without: " in line


def test_versions_are_those_of_the_lock_but_for_what_the_machine_has() -> None:
    lock = "numpy==2.5.5 ; python_version >= '3.12'\nPy_Arrow==22.0\nsetuptools==84.2.1\ntorch==2.13.0\ntyro==1.0"
    has = {"numpy": "2.1.0", "py-arrow": "19.0", "torch": "2.11.0+cu130"}
    assert lock_versions(lock, has).splitlines() == ["tyro==1.0", "torch==2.11.0+cu130"]


def test_packages_are_found_by_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("Typing_Extensions", "4.1"), ("ruamel.yaml", "0.18")):
        (tmp_path / f"{name}-{number}.dist-info").mkdir()
        (tmp_path / f"{name}-{number}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {number}\n")
    (tmp_path / "half_gone-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install.list_installed() == {"typing-extensions": "4.1", "ruamel-yaml": "0.18"}


@pytest.mark.slow
def test_with_a_network_too_nothing_is_installed_over_what_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lock names versions that nobody has: pip would look for them if it were told to."""
    (tmp_path / "lock").write_text("numpy==99.1\nsetuptools==99.1\ntorch==99.1\n")
    monkeypatch.setattr(install, "LOCK", tmp_path / "lock")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert install.main(tmp_path / "venv", tmp_path / "no-wheels") == 0, capfd.readouterr()
    assert not list((tmp_path / "venv").rglob("*.dist-info"))


# Wheels for a machine without a network: all that is needed, and nothing that it has

LOCK = """\
deepspeed==0.19.8
exceptiongroup==1.3.1 ; python_full_version < '3.11'
numpy==2.2.6 ; python_full_version < '3.11'
numpy==2.5.5 ; python_full_version >= '3.12'
"""


def test_packages_come_with_what_they_need_and_without_what_the_machine_has() -> None:
    found = collect_requirements(NEEDED, ("torch",), "3.12")
    assert {"deepspeed", "hjson", "py-cpuinfo", "pydantic", "pydantic-core", "tyro", "tokenizers", "pytest"} <= {*found}
    assert len(found) == len({*found})
    assert not {"torch", "sympy", "networkx", "triton"} & {*found}, "torch and what it alone needs are the machine's"
    fewer = collect_requirements(NEEDED, ("torch", "numpy", "transformers"), "3.12")
    assert not {"numpy", "transformers", "tokenizers", "huggingface-hub"} & {*fewer}
    assert "tqdm" in fewer  # which deepspeed needs too
    assert "exceptiongroup" in collect_requirements(["pytest"], (), "3.10")
    assert "exceptiongroup" not in collect_requirements(["pytest"], (), "3.12")


def test_versions_are_those_of_the_lock_for_the_machines_python() -> None:
    assert select_locked({"numpy", "exceptiongroup"}, LOCK, "3.10") == ["exceptiongroup==1.3.1", "numpy==2.2.6"]
    assert select_locked({"numpy", "deepspeed"}, LOCK, "3.12") == ["deepspeed==0.19.8", "numpy==2.5.5"]


def pretend_installed(place: Path, **versions: str) -> None:
    """Lets pip find packages in an environment of which nothing but their names is there."""
    [site] = place.glob("lib/python*/site-packages")
    for name, number in versions.items():
        about = site / f"{name}-{number}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        (about / "INSTALLER").write_text("pip\n")
        (about / "RECORD").write_text("")


@pytest.mark.slow
def test_wheels_are_all_that_a_bare_machine_needs_and_they_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an index; beside what the machine has, which is here by name alone. With the shards they are 45 MiB."""
    wheels, machine = tmp_path / "wheels", tmp_path / "machine"
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(gathering, "COMMIT", wheels / "commit.txt")
    prepare(Wheels(python=own), Console(file=io.StringIO()))
    venv.create(machine, with_pip=True)
    pretend_installed(machine, torch="2.12.0", numpy="2.2.6", pyarrow="21.0.0")
    pip = [str(machine / "bin" / "python"), "-m", "pip"]
    install = [*pip, "install", "--no-index", "--find-links", str(wheels), *NEEDED]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run([*pip, "check"], check=True)
    assert sum(path.stat().st_size for path in wheels.iterdir()) < 36 * 2**20
