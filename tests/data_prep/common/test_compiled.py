"""What numba compiles is kept for every kind of processor that shares a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import llvmlite.binding
import numba
import pytest

from data_prep.common import compiled


def test_kinds_of_processors_share_a_folder_and_not_the_mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    folders = set()
    for name in ("skylake", "znver4"):
        compiled._version.cache_clear()
        monkeypatch.setattr(llvmlite.binding, "get_host_cpu_name", lambda name=name: name)
        folders.add(compiled._cache_folder())
        assert not compiled.compiled_before("nsp")
        compiled.remember_compiled("nsp")
        assert compiled.compiled_before("nsp")
    compiled._version.cache_clear()
    assert len(folders) == 1


def test_folders_of_other_versions_are_not_looked_into() -> None:
    """Another process, which begins at the same time, may be deleting them."""
    before = compiled._version()
    other = compiled.SOURCES / "__pycache__" / f"{compiled.PREFIX}test" / "common_1"
    other.mkdir(parents=True)
    (other / "odd.py").touch()
    compiled._version.cache_clear()
    try:
        assert compiled._version() == before
    finally:
        shutil.rmtree(other.parent)
