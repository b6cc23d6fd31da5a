"""What a node says of the code that it sees, for all nodes to compare."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cluster import health
from cluster.health import describe_code


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code of a few files."""
    root = tmp_path / "root"
    monkeypatch.setattr(health, "ROOT", root)
    for folder in health.FOLDERS:
        (root / folder / "__pycache__").mkdir(parents=True)
        (root / folder / "code.py").write_text(f"# of {folder}\n")
    return root


def test_other_code_is_seen_and_another_place_is_not(root: Path) -> None:
    before = describe_code()["code"]
    elsewhere = shutil.copytree(root, root.parent / "elsewhere")
    health.ROOT = elsewhere  # undone with the fixture
    assert describe_code()["code"] == before
    (elsewhere / health.FOLDERS[0] / "more").mkdir()
    (elsewhere / health.FOLDERS[0] / "more" / "code.py").write_text("more = 1\n")
    assert describe_code()["code"] != before


def test_what_python_compiles_meanwhile_is_no_matter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others begin at the same time: folders of caches come and go while this node looks."""
    before, scan = describe_code()["code"], os.scandir

    def scan_or_miss(path: str) -> object:
        if "__pycache__" in str(path):
            raise FileNotFoundError(path)
        return scan(path)

    (root / health.FOLDERS[0] / "__pycache__" / "code.py").write_text("compiled = 1\n")
    monkeypatch.setattr(os, "scandir", scan_or_miss)
    assert describe_code()["code"] == before


def test_code_that_is_missing_is_other_code(root: Path) -> None:
    before = describe_code()["code"]
    shutil.rmtree(root / health.FOLDERS[0])
    assert describe_code()["code"] != before


def test_code_that_may_not_be_read_is_a_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> object:
        raise PermissionError(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match=str(root / health.FOLDERS[0])):
        describe_code()
