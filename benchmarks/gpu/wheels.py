#!/usr/bin/env python3
"""Gathers the wheels that a machine with a GPU and without a network needs for `make gpu`.

    python benchmarks/gpu/wheels.py --out build/gpu-wheels --python 3.12 --has torch numpy pyarrow

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
from collections.abc import Collection, Iterable, Mapping, Sequence
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
MOST = 64
"""Size limit in MiB of the tree, wheels and shards on lent machines."""
SOURCES_ONLY = ("deepspeed",)
"""Packages without a wheel in the index, which are built here without kernels."""


@dataclass(frozen=True)
class Wheels:
    """Gathers wheels."""

    out: Path
    """Folder for the wheels, which is emptied first."""
    python: str = "3.12"
    """Python of the machine."""
    has: tuple[str, ...] = ("torch", "numpy", "pyarrow")
    """Packages of the machine."""
    shards: Path = Path("build/gpu-shards")
    """Folder of shards, to count its size."""


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
    """Gathers all wheels or none, and lists them."""
    shutil.rmtree(settings.out, ignore_errors=True)
    settings.out.mkdir(parents=True)
    try:
        gather(collect_requirements(NEEDED, (TORCH, *settings.has), settings.python), settings.out, settings.python)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(settings.out)  # an incomplete set is useless
        raise UserError(f"pip ended with {error.returncode}; its message above says why") from error
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in settings.out.iterdir()}
    for name in sorted(sizes, key=lambda each: -sizes[each]):
        console.print(f"{sizes[name]:7.2f} MiB  {name}")
    (settings.out / COMMIT.name).write_text(f"{find_commit()} {compute_code_digest()}\n")
    total = sum(sizes.values())
    console.print(f"{total:7.2f} MiB  in {len(sizes)} wheels for Python {settings.python}: {settings.out}")
    console.print(
        "\n".join(describe_load(total, count_mib(settings.shards.rglob("*")), count_mib(tracked_files()))), markup=False
    )


def count_mib(paths: Iterable[Path]) -> float:
    """Returns the size of the files among these paths in MiB."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


def tracked_files() -> list[Path]:
    """Lists the tracked files of this checkout; none outside of a checkout."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def describe_load(wheels: float, shards: float, tree: float) -> list[str]:
    """Describes the sizes in MiB, and how to reduce them if they exceed the limit of lent machines."""
    load = wheels + shards + tree
    lines = [f"{load:7.2f} MiB  go to the machine: wheels {wheels:.1f}, shards {shards:.1f}, tree {tree:.1f}"]
    if load > MOST:
        lines.append(f"that is more than the {MOST} MiB that lent machines take; leave out what that one has:")
        lines.append('make gpu-wheels HAS="torch numpy pyarrow transformers pydantic numba"')
        if shards > wheels:
            lines.append("those of real text, which CLOZE_DATA names, are smaller than those of the demo corpus")
    return lines


if __name__ == "__main__":
    run_command(Wheels, prepare, "gpu")
