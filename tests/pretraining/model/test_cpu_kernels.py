"""The library of CPU kernels that is loaded is whole, and nobody else's."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from data_prep.common.private_folders import cache_home
from pretraining.model import cpu_kernels as kernels

pytestmark = pytest.mark.skipif(kernels.find_compiler() is None, reason="no C++ compiler")
COMPILER = kernels.find_compiler() or ""


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a library was built; each is a copy of the one that this process has, which takes no time."""
    made = list[Path]()
    kernels._functions()
    original = cache_home() / "cloze" / kernels._name_library(COMPILER)

    def build(_: str, work: Path) -> Path:
        made.append(work)
        (work / "kernels.so").write_bytes(original.read_bytes()[: -kernels.CHECKSUM_SIZE])
        return work / "kernels.so"

    monkeypatch.setattr(kernels, "_build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return made


@pytest.mark.parametrize("size", [0, 1, 9000, -1])
def test_a_part_of_a_library_is_built_again(builds: list[Path], tmp_path: Path, size: int) -> None:
    """The system ends who runs a part of a library with a bus error, and would at each start."""
    assert kernels._load_library(COMPILER).kernels
    [library] = (tmp_path / "cloze").iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process runs it
    library.write_bytes(whole[:size])
    library.chmod(0o700)
    assert kernels._load_library(COMPILER).kernels
    assert (library.read_bytes() == whole, len(builds)) == (True, 2)


def test_there_is_a_library_for_each_processor(builds: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Which a home folder may serve by turns."""
    for processor, count in (("one", 1), ("one", 1), ("another", 2)):
        monkeypatch.setattr(kernels, "_read_processor", lambda name=processor: name)
        assert kernels._load_library(COMPILER).kernels
        assert len(builds) == len([*(tmp_path / "cloze").iterdir()]) == count


def test_a_library_is_kept_beside_temporary_files_where_the_home_cannot_be_written(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels._load_library(COMPILER).kernels
    folder = tmp_path / f"cloze-{os.geteuid()}"
    assert (folder.stat().st_mode & 0o777, len([*folder.iterdir()]), len(builds)) == (0o700, 1, 1)


@pytest.mark.parametrize("planted", ["folder", "library", "another user's"])
def test_a_library_that_others_may_have_planted_is_not_loaded(
    builds: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], planted: str
) -> None:
    folder = tmp_path / "cloze"
    library = folder / kernels._name_library(COMPILER)
    assert kernels._load_library(COMPILER).kernels
    inode = library.stat().st_ino
    (folder if planted == "folder" else library).chmod(0o777)
    if planted == "another user's":
        if os.geteuid():
            pytest.skip("only root gives files away")
        library.chmod(0o755)
        os.chown(library, 12345, -1)
    assert kernels._load_library(COMPILER).kernels
    assert len(builds) == 2
    assert not builds[-1].exists()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / 'cloze'}")
    elsewhere = f"kept in {tmp_path}/cloze-{os.geteuid()}" if planted == "folder" else "built for this process alone"
    assert line.endswith(f"; the kernels for CPUs are {elsewhere}")
    assert library.stat().st_ino == inode


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = tmp_path / "my tools" / "wrapper"
    spaced.parent.mkdir()
    spaced.write_text('#!/bin/sh\nexec "$@"\n')
    spaced.chmod(0o755)
    plain = shutil.which("g++") or COMPILER
    monkeypatch.setenv("CXX", f"'{spaced}' {plain} -O1")
    assert kernels.find_compiler() == f"'{spaced}' {plain} -O1"
    names = {kernels._name_library(compiler) for compiler in (plain, f"'{spaced}' {plain}", f"'{spaced}' {plain} -O1")}
    assert len(names) == 3, "arguments decide what is built"
    monkeypatch.setattr(kernels, "FLAGS", [])
    monkeypatch.setattr(kernels, "MAIN_SOURCE", tmp_path / "small.cpp")
    kernels.MAIN_SOURCE.write_text("int small = 1;\n")
    assert kernels._build(kernels.find_compiler() or "", tmp_path).exists()
