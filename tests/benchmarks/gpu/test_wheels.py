"""The wheels for a machine without a network are all that is needed, and nothing that it has."""

from __future__ import annotations

import io
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gpu.install import NEEDED
from benchmarks.gpu.wheels import Wheels, collect_requirements, describe_load, prepare, select_locked

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
    assert [("exceptiongroup" in collect_requirements(["pytest"], (), old)) for old in ("3.10", "3.12")] == [
        True,
        False,
    ]


def test_versions_are_those_of_the_lock_for_the_machines_python() -> None:
    assert select_locked({"numpy", "exceptiongroup"}, LOCK, "3.10") == ["exceptiongroup==1.3.1", "numpy==2.2.6"]
    assert select_locked({"numpy", "deepspeed"}, LOCK, "3.12") == ["deepspeed==0.19.8", "numpy==2.5.5"]


def test_what_is_too_much_for_a_lent_machine_is_told() -> None:
    [fits] = describe_load(33.3, 8.9, 5.4)
    assert "47.60 MiB" in fits
    assert "HAS=" in "".join(describe_load(33.3, 37.0, 5.4))


def pretend_installed(place: Path, **versions: str) -> None:
    """Lets pip find packages in an environment of which nothing but their names is there."""
    [site] = place.glob("lib/python*/site-packages")
    for name, version in versions.items():
        about = site / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "INSTALLER").write_text("pip\n")
        (about / "RECORD").write_text("")


@pytest.mark.slow
def test_wheels_are_all_that_a_bare_machine_needs_and_they_are_small(tmp_path: Path) -> None:
    """Without an index; beside what the machine has, which is here by name alone. With the shards they are 45 MiB."""
    wheels, machine = tmp_path / "wheels", tmp_path / "machine"
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    prepare(Wheels(wheels, python=own), Console(file=io.StringIO()))
    venv.create(machine, with_pip=True)
    pretend_installed(machine, torch="2.12.0", numpy="2.2.6", pyarrow="21.0.0")
    pip = [str(machine / "bin" / "python"), "-m", "pip"]
    install = [*pip, "install", "--no-index", "--find-links", str(wheels), *NEEDED]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    subprocess.run([*pip, "check"], check=True)
    assert sum(path.stat().st_size for path in wheels.iterdir()) < 36 * 2**20
