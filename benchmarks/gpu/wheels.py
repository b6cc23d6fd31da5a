#!/usr/bin/env python3
"""Gathers the wheels that a machine with a GPU and without a network needs for `make gpu`.

    python benchmarks/gpu/wheels.py --python 3.12 --has torch numpy pyarrow

Omits the packages of the machine and their requirements; torch with its CUDA libraries is always omitted.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from data_prep.common.beginning import begin

    begin()

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

from benchmarks.gpu.install import NEEDED, ROOT
from benchmarks.measure import COMMIT, compute_code_digest, find_commit, run_command
from data_prep.common.errors import UserError

FOLDER = Path(__file__).parent / "bare"
"""Put first in the path of a Python that sees only the packages of such a machine."""
TORCH = "torch"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCES_ONLY = ("deepspeed",)
"""Packages without a wheel in the index, which are built here without kernels."""


@dataclass(frozen=True)
class Wheels:
    """Gathers wheels."""

    python: str = "3.12"
    """Python of the machine."""
    has: tuple[str, ...] = ("torch", "numpy", "pyarrow")
    """Packages of the machine."""


def collect_requirements(names: Sequence[str], has: Collection[str], python: str) -> list[str]:
    """Collects packages and their requirements, as installed here, without those that the machine has."""
    waiting, found = list(names), []
    there = {canonicalize_name(name) for name in has}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in there:
            continue
        there.add(name)
        found.append(name)
        waiting += [each.name for each in _needs(name) if applies_to(each, python)]
    return sorted(found)


def _needs(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:  # for another Python: small packages without requirements
        return []


def applies_to(requirement: Requirement, python: str) -> bool:
    """Whether a requirement applies to this version of Python."""
    target = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(target)


def list_hidden_modules() -> list[str]:
    """Lists the modules that are installed here, but not on such a machine."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    there = {*collect_requirements([TORCH, *NEEDED], (), python), "cloze", "pip", "setuptools"}
    found = packages_distributions().items()
    return sorted(module for module, packages in found if not there & {*map(canonicalize_name, packages)})


def hide_packages(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Builds an environment in which Python sees only the packages of such a machine."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [environment.get("PYTHONPATH")])])
    # pytest finds a plugin by its package, which is installed, and not by its module, which is hidden
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p pytest_timeout"}
    return {**environment, **plugins, "PYTHONPATH": path, "HIDDEN_MODULES": " ".join(list_hidden_modules())}


def select_locked(names: Collection[str], lock: str, python: str) -> list[str]:
    """Returns packages with their versions in a lock file, for a version of Python."""
    lines = [Requirement(line) for line in lock.splitlines()]
    return [f"{each.name}{each.specifier}" for each in lines if each.name in names and applies_to(each, python)]


def gather(names: Sequence[str], out: Path, python: str) -> None:
    """Downloads wheels in the versions of requirements.lock, and builds missing ones."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    lock = (ROOT / "requirements.lock").read_text()
    built = select_locked(set(names) & {*SOURCES_ONLY}, lock, python)
    if built:  # kernels are compiled on the machine
        without_kernels = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(out), *built], check=True, env=without_kernels)
    target = ["--no-deps", "--python-version", python, "--only-binary=:all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    rest = select_locked(set(names) - {*SOURCES_ONLY}, lock, python)
    subprocess.run([*pip, "download", *target, "--dest", str(out), *rest], check=True)


def prepare(settings: Wheels, console: Console) -> None:
    """Gathers all wheels or none in an empty folder, and lists them."""
    out = COMMIT.parent
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        gather(collect_requirements(NEEDED, (TORCH, *settings.has), settings.python), out, settings.python)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(out)  # an incomplete set is useless
        raise UserError(f"pip ended with {error.returncode}; its message above says why") from error
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in out.iterdir()}
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        console.print(f"{sizes[name]:7.2f} MiB  {name}")
    COMMIT.write_text(f"{find_commit()} {compute_code_digest()}\n")
    console.print(f"{sum(sizes.values()):7.2f} MiB  in {len(sizes)} wheels for Python {settings.python}: {out}")


if __name__ == "__main__":
    run_command(Wheels, prepare, "gpu")
