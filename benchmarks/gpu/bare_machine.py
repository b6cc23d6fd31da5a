"""The packages of a bare GPU machine: NEEDED and its requirements. A dry run sees no others."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.install import NEEDED

FOLDER = Path(__file__).parent / "bare"
"""Put first in the path of a Python that sees only the packages of such a machine."""
TORCH = "torch"


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
