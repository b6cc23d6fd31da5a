"""From what is given as --docs to files."""

import glob
import gzip
import os
import shlex
from pathlib import Path

import pytest
from support.commands import refusal

from data_prep.pipeline.pipeline import collect_faults
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files, group_sources, make_bundles

TEXT = "A book begins here. It has\nparagraphs of several lines,\nas books have. It ends.\n\nThat was all of it.\n"
SENTENCES = "This is one.\nThis is two.\n\nThis is three.\nThis is four.\n"
SKIP = "--errors skip leaves it out and lists it"
JSON = '{"text": "One."}\n{"text": "Two."}\n'


def fill(folder: Path, **files: str | bytes) -> Path:
    """Writes files, named with __ for a / and _dot_ for a point."""
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def names(*arguments: object) -> list[str]:
    return [file.name for file in find_files([*map(str, arguments)])]


def message(*arguments: object, format: str = "") -> str:
    return refusal(find_files, [*map(str, arguments)], {"": format} if format else None)


# What is found


def test_a_folder(tmp_path: Path) -> None:
    """Hidden and empty files are left out."""
    folder = fill(tmp_path / "books", Z__b_dot_txt=TEXT, a_dot_md=TEXT, Z__a_dot_txt=TEXT, _dot_hidden=b"\x00")
    fill(folder, Z__y__c_dot_txt_dot_gz=gzip.compress(TEXT.encode()), empty_dot_csv="")
    fill(folder, _SUCCESS="x", _dot_git__config="x", _logs__x="x")
    files = find_files([str(folder)], None)
    assert [file.name for file in files] == ["Z/a.txt", "Z/b.txt", "Z/y/c.txt.gz", "a.md"]
    assert {(file.source, file.format) for file in files} == {("books", "text")}
    assert [file.size for file in files] == [Path(file.path).stat().st_size for file in files]


def test_names_do_not_depend_on_where_a_folder_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("here", "far/away"):
        fill(tmp_path / place / "wiki", AA__x=JSON, AB__x=JSON)
        fill(tmp_path / place, one_dot_jsonl=JSON)
    monkeypatch.chdir(tmp_path / "here")
    for docs in ("wiki", "wiki/", "./wiki", tmp_path / "far/away/wiki", "wiki/*", "wiki/*/*", "w?ki", "wiki/**/x"):
        assert names(docs) == ["AA/x", "AB/x"], docs
    assert names("one.jsonl") == names(tmp_path / "far/away/one.jsonl") == ["one.jsonl"]
    monkeypatch.chdir(tmp_path / "here/wiki")
    assert names(".") == ["AA/x", "AB/x"]


def test_order_is_that_of_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{folder}__{name}_dot_jsonl": JSON for folder in ("ca", "b") for name in "zyx"}
    folder = fill(tmp_path / "x", **files, d_dot_jsonl=JSON)
    expected = ["b/x.jsonl", "b/y.jsonl", "b/z.jsonl", "ca/x.jsonl", "ca/y.jsonl", "ca/z.jsonl", "d.jsonl"]
    assert names(folder) == expected
    walk, match = os.walk, glob.glob
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((top, below, files[::-1]) for top, below, files in walk(*a, **k)))
    monkeypatch.setattr(glob, "glob", lambda *a, **k: match(*a, **k)[::-1])
    assert names(folder) == names(folder / "*") == expected


def test_sources_are_named_after_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "20231101.de", **{"wiki.2020_dot_jsonl": JSON, "a_dot_jsonl": JSON})
    fill(tmp_path, a__x_dot_jsonl=JSON, b__y_dot_jsonl=JSON, **{"c=d_dot_jsonl": JSON})
    monkeypatch.chdir(tmp_path)
    given = ["20231101.de", "20231101.de/*.jsonl", "label=x/y", "..=x", ".", "20231101.de/wiki.2020.jsonl"]
    sources = [group_sources([argument])[0][0] for argument in given]
    assert sources == ["20231101.de", "20231101.de", "label", "..=x", tmp_path.name, "wiki.2020"]
    files = find_files(["wiki=a", "b/*.jsonl", "c=d.jsonl"], None)
    assert [(file.source, file.name) for file in files] == [("wiki", "x.jsonl"), ("b", "y.jsonl"), ("c=d", "c=d.jsonl")]


def test_files_that_a_shell_spelled_out_are_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "many", empty_dot_jsonl="", **{f"{number}_dot_jsonl": JSON for number in range(50)})
    monkeypatch.chdir(tmp_path)
    files = find_files(sorted(map(str, Path("many").iterdir())), None)
    assert ({file.source for file in files}, len(files)) == ({"many"}, 50)


# What is refused


def test_missing_paths_and_folders_with_nothing_in_them(tmp_path: Path) -> None:
    for given in (tmp_path / "none", tmp_path / "*.txt", "label="):
        assert message(given) == f"--docs {given}: no such file or folder"
    fill(tmp_path / "w", _dot_hidden=TEXT, a__b___x=TEXT)
    (tmp_path / "z/a/b").mkdir(parents=True)
    for name in ("w", "z", "z/a/b"):
        assert message(tmp_path / name) == f"--docs {tmp_path}/{name}: an empty folder"
    fill(tmp_path / "y", a_dot_txt="", b__c_dot_txt="")
    for name in ("y", "y/a.txt"):
        assert message(tmp_path / name) == f"--docs {tmp_path}/{name}: no file with anything in it"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", a_dot_html="<html>", b_dot_png=b"\x89PNG", d_dot_png=b"\x89PNG", c_dot_txt=TEXT)
    lines = message(folder).split("\n")
    assert lines[:2] == [f"--docs {folder}: 3 of 4 files cannot be read", f"  {folder}/a.html: a web page"]
    skip, say = (
        "--errors skip leaves out what cannot be read, and lists it",
        "or --format x=text reads all of x as plain text",
    )
    assert lines[3:] == [f"  {folder}/b.png: an image (2 such files)", skip, say]


def test_each_file_of_a_source_is_read_by_its_own_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "x", a_dot_txt=TEXT, b_dot_jsonl=JSON, c_dot_md=TEXT, d_dot_jsonl=JSON, e=TEXT)
    expected = [("b.jsonl", "jsonl"), ("d.jsonl", "jsonl"), ("a.txt", "text"), ("c.md", "text"), ("e", "text")]
    monkeypatch.chdir(tmp_path)
    files = find_files(["x"], {})
    assert [(file.source, file.name, file.format) for file in files] == [("x", *row) for row in expected]
    assert [bundle.format for bundle in make_bundles(files)] == ["jsonl", "text"]
    for arguments in (["x/*"], ["x/*.jsonl", "x/*.txt", "x/*.md", "x/e"], sorted(map(str, folder.iterdir()))):
        found = {file.name: file.format for file in find_files(arguments, {}) if file.source == "x"}
        assert found.items() <= dict(expected).items()
        assert found


def test_the_format_of_one_source(tmp_path: Path) -> None:
    fill(tmp_path, lines_dot_txt=SENTENCES, more__a_dot_txt=SENTENCES, more__b_dot_jsonl=JSON)
    arguments = [str(tmp_path / "lines.txt"), str(tmp_path / "more")]
    found = [(file.source, file.format) for file in find_files(arguments, {"more": "text"})]
    assert found == [("lines", "sentences"), ("more", "jsonl"), ("more", "text")]  # nobody wants JSON read as text
    assert {file.format for file in find_files(arguments, {"more": "text", "": "text"})} == {"jsonl", "text"}
    said = "--format mroe=text: there is no source mroe, only lines, more\na source has the name of its folder or file"
    assert refusal(find_files, arguments, {"mroe": "text"}).startswith(said)


def test_cures_can_be_given_to_a_shell(tmp_path: Path) -> None:
    folder = fill(tmp_path / "My notes", a_dot_txt=SENTENCES, b_dot_txt=TEXT, c_dot_pdf=b"%PDF-1.4")
    said = message(folder, format="text")
    assert shlex.split(said.split("\n")[2])[:3] == ["pdftotext", f"{folder}/c.pdf", "NEW.txt"]
    (folder / "c.pdf").rename(folder / "c.html")
    (folder / "c.html").write_text("<html>")
    (folder / "a.txt").unlink()
    said = message(folder)
    assert shlex.split(said[said.index("or --format") :])[2] == "My notes=text"


def test_files_that_are_named_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "x", a_dot_txt=TEXT, b_dot_txt=TEXT, c__d_dot_txt=TEXT)
    twice = "is named twice (1 in all); each text counts once; --errors skip leaves the other names out"
    assert message(folder, folder / "a.txt") == f"--docs: {folder}/a.txt {twice}"
    monkeypatch.chdir(tmp_path)
    assert message("x/b.txt", "x/../x/b.txt").startswith("--docs: x/b.txt is x/../x/b.txt by another name (1 in")
    assert message("x/c", f"more={tmp_path}/x/c").startswith(f"--docs: {tmp_path}/x/c/d.txt is x/c/d.txt by another")
    assert "(3 in all)" in message("x", "x/*")
    for make in (Path.symlink_to, Path.hardlink_to):
        make(folder / "e.txt", folder / "b.txt")
        assert message("x").startswith("--docs: x/e.txt is x/b.txt by another name (1 in")
        problems = Problems("skip")
        assert [file.path for file in find_files(["x"], problems=problems)] == ["x/a.txt", "x/b.txt", "x/c/d.txt"]
        assert problems.skipped == ["x/e.txt: another name of x/b.txt"]
        assert collect_faults([], problems).skipped == ["x/e.txt: another name of x/b.txt"]
        (folder / "e.txt").unlink()
    problems = Problems("skip")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(fill(tmp_path / "lib", a_dot_py="x = 1", b_dot_py="x = 2")))
    assert len(find_files(["demo", "demo"], problems=problems)) == 1
    (skipped,) = collect_faults([], problems).skipped
    assert skipped.startswith("demo/")
    assert str(tmp_path) not in skipped, "equal on all machines"
    with gzip.open(folder / "part.json.gz", "wb"):
        (folder / "blank.jsonl").write_bytes(b"\xef\xbb\xbf\n\n")
    assert [file.path for file in find_files(["x"])] == ["x/a.txt", "x/b.txt", "x/c/d.txt"]


def test_folders_that_are_linked_from_several_places_are_read_once(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", a__b_dot_txt=TEXT)
    (folder / "a" / "loop").symlink_to(folder)
    (folder / "other").symlink_to(folder / "a")
    (folder / "y").symlink_to(fill(tmp_path / "y", c_dot_txt=TEXT))
    assert names(folder) == ["a/b.txt", "y/c.txt"]
    (folder / "b.txt").symlink_to("gone.txt")
    expected = f"--docs: {folder}/b.txt: cannot be read: No such file or directory (a link to nothing)\n{SKIP}"
    assert message(folder) == message(folder / "*.txt") == expected


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    try:
        Path(os.fsdecode(path)).write_text(TEXT)
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    (tmp_path / "b.txt").write_text(TEXT)
    assert message(tmp_path).endswith("caf\\udce9.txt: the name is not UTF-8; rename it\n" + SKIP)
    problems = Problems("skip")
    assert [file.name for file in find_files([str(tmp_path)], problems=problems)] == ["b.txt"]
    assert problems.skipped == [f"{tmp_path}/caf\\udce9.txt: the name is not UTF-8; rename it"]
