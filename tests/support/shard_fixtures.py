"""Shards, many and small, that no test changes, for test modules that name this one in `pytest_plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import made_once
from support.shards import make_shards

from data_prep.shards import Manifest
from pretraining.data.dataset import Dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.getbasetemp()
    return made_once(own, "many", lambda place: make_shards(place / "shards", documents=1500)) / "shards"


@pytest.fixture(scope="session")
def manifest(folder: Path) -> Manifest:
    return Manifest.read(folder)


@pytest.fixture
def dataset(folder: Path, manifest: Manifest) -> Dataset:
    return Dataset(folder, manifest, 32)
