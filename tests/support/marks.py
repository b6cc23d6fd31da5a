"""Marks of tests and of their parameters, and whether there is a GPU for them."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter of tests that are run with the slow ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


def has_compiler() -> bool:
    """Whether there is a C++ compiler; asking loads nothing. `CXX=none` stands for a machine without one."""
    return bool(shutil.which((os.environ.get("CXX") or "g++").split()[0]))


def has_gpu() -> bool:
    """Whether this machine has a GPU that tests may use; asking loads nothing."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(Path("/dev").glob("nvidia[0-9]*"))
