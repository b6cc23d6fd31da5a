"""Marks of tests and of their parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter of tests that are run with the slow ones."""
    return pytest.param(*values, marks=pytest.mark.slow)
