"""Whatever stands in a folder beside files is named, and never opened, waited for or gone round in."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.reading import write

from data_prep.common.errors import UserError
from data_prep.readers import identity
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files

TEXT = "A text of some words.\nIt has two lines, and more than that.\n\nAnd paragraphs.\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Makes a folder with a text, and with all that no text is."""
    folder = tmp_path / "x"
    folder.mkdir()
    write(folder / "a.txt", TEXT)
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(folder)  # the name of a socket may not be long
        server.bind("socket.txt")
        os.chdir(here)
        (folder / "device.txt").symlink_to("/dev/zero")
        yield folder


@pytest.mark.timeout(20)
def test_pipes_sockets_and_devices(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_files([str(folder)])
    lines = str(caught.value).split("\n")
    assert lines[0] == f"--docs {folder}: 3 of 4 files cannot be read"
    faults = [f"{folder}/{kind}.txt: a {kind}" for kind in ("device", "pipe", "socket")]
    assert set(lines[1:5]) == {*(f"  {fault}" for fault in faults), "    write what comes out of it into a file"}
    assert "--errors skip leaves out" in lines[5]
    problems = Problems("skip")
    assert [file.name for file in find_files([str(folder)], problems=problems)] == ["a.txt"]
    assert sorted(problems.skipped) == faults
    assert problems.names[f"{folder}/pipe.txt"] == "x/pipe.txt"
    for name in ("pipe", "socket", "device"):
        for errors in ("fail", "skip"):
            with pytest.raises(UserError, match=f"1 of 1 files cannot be read\n  .*{name}.txt: a {name}"):
                find_files([str(folder / f"{name}.txt")], problems=Problems(errors))


@pytest.mark.timeout(20)
def test_links_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT)
    for name, target in {"b": "c", "c": "b", "self": "."}.items():
        (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError) as caught:
        find_files([str(tmp_path)])
    too_many = "cannot be read: Too many levels of symbolic links"
    assert str(caught.value) == f"--docs: {tmp_path}/b: {too_many}\n--errors skip leaves it out and lists it"
    problems = Problems("skip")
    assert [file.name for file in find_files([str(tmp_path)], problems=problems)] == ["a.txt"]
    assert problems.skipped == [f"{tmp_path}/{name}: {too_many}" for name in "bc"]
    with pytest.raises(UserError, match=too_many):
        find_files([str(tmp_path / "b")])
    with pytest.raises(UserError, match=f"no file that can be read; such as .*{too_many}"):
        find_files([str(tmp_path / "b")], problems=Problems("skip"))


def test_files_and_folders_that_cannot_be_opened_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    (folder / "closed").mkdir(parents=True)
    write(folder / "a.txt", TEXT)
    write(folder / "b.txt", TEXT + "And more.")
    write(folder / "closed" / "c.txt", TEXT)
    scan = os.scandir

    def refuse(path: str, *arguments: object, **options: object) -> object:
        if str(path).endswith(("b.txt", "closed")):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path) if os.path.isdir(path) else open(path, "rb")

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(identity, "open", refuse, raising=False)
    denied = "cannot be read: Permission denied"
    with pytest.raises(UserError, match=f"{folder}/closed: {denied}\n--errors skip leaves it out and lists it"):
        find_files([str(folder)])
    with pytest.raises(UserError, match=f"{folder}/b.txt: {denied}\n--errors skip leaves it out and lists it"):
        find_files([str(folder / "b.txt")])
    problems = Problems("skip")
    assert [file.name for file in find_files([str(folder)], problems=problems)] == ["a.txt"]
    assert problems.skipped == [f"{folder}/closed: {denied}", f"{folder}/b.txt: {denied}"]
    assert problems.names[f"{folder}/closed"] == "x/closed"


def test_two_names_of_one_file(tmp_path: Path) -> None:
    os.link(write(tmp_path / "a.txt", TEXT), tmp_path / "b.txt")
    with pytest.raises(UserError, match=r"a.txt is named twice \(1 such files\)"):
        find_files([str(tmp_path)])
    write(tmp_path / "c.txt", TEXT)  # a copy is another file
    (tmp_path / "b.txt").unlink()
    assert len(find_files([str(tmp_path)])) == 2


def test_what_links_bring_out_of_the_output_folder(tmp_path: Path) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "x").mkdir()
    for place in ("x/a.txt", "out/b.txt", "out/deep/c.txt"):
        write(tmp_path / place, TEXT + place)
    (tmp_path / "x" / "link.txt").symlink_to("../out/b.txt")
    (tmp_path / "x" / "folder").symlink_to("../out/deep")
    assert [file.name for file in find_files([str(tmp_path / "x")], out=tmp_path / "out")] == ["a.txt"]
    with pytest.raises(UserError, match="no file with anything in it"):
        find_files([str(tmp_path / "out/*.txt")], out=tmp_path / "out")


def test_the_output_folder_is_not_within_the_text(tmp_path: Path) -> None:
    """Or the next run would read what this one has written."""
    (tmp_path / "x").mkdir()
    write(tmp_path / "x" / "a.txt", TEXT)
    (tmp_path / "link").symlink_to("x")
    for docs, out in (("x", "x"), ("x", "x/deep/out"), ("link", "x/out"), ("x", "link/out"), ("*", "x/out")):
        with pytest.raises(UserError, match=f"--out {tmp_path / out}: (is|lies within) --docs"):
            find_files([str(tmp_path / docs)], out=tmp_path / out)
    assert len(find_files([str(tmp_path / "x")], out=tmp_path / "xy")) == 1
    (tmp_path / "x" / "out").mkdir()  # by an earlier run of the same command
    write(tmp_path / "x" / "out" / "shards", TEXT)
    assert len(find_files([str(tmp_path / "x" / "*")], out=tmp_path / "x" / "out")) == 1
