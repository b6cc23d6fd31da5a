"""Web sites for tests of downloads, in surroundings without a user's settings.

A test module that names this module in `pytest_plugins` has its fixtures. It never imports the module: then pytest
could not rewrite the module's assertions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.website import Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    yield from serve()


@pytest.fixture
def mirror() -> Iterator[Site]:
    yield from serve()


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to work in, no proxy, and nothing of the user's own settings for the hub."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
