"""Files of a folder: what is no file, what tells a file, the bundles of work made of them, and the demo."""

import gzip
import hashlib
import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.commands import assert_refusal, refusal
from support.reading import COMPRESS, read, write

from data_prep.readers import cutting
from data_prep.readers.cutting import EDGE, read_ends
from data_prep.readers.formats import demo
from data_prep.readers.reader import Problems
from data_prep.readers.sources import SourceFile, find_files, make_bundles

TEXT = "A text of some words.\nIt has two lines, and more than that.\n\nAnd paragraphs.\n"


@pytest.mark.timeout(20)
def test_pipes_sockets_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    monkeypatch.chdir(folder)  # the name of a socket may not be long
    write(folder / "a.txt", TEXT)
    os.mkfifo("pipe.txt")
    (folder / "device.txt").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
    what, kinds = "a pipe, a socket or a device", ("device", "pipe", "socket")
    faults = [f"{folder}/{kind}.txt: {what}" for kind in kinds]
    said = f"--docs {folder}: 3 of 4 files cannot be read\n  {faults[0]} (3 such files)\n    write what comes out of it"
    assert refusal(find_files, [str(folder)]).startswith(said)
    problems = Problems("skip")
    assert [file.name for file in find_files([str(folder)], problems=problems)] == ["a.txt"]
    assert (sorted(problems.skipped), problems.names[f"{folder}/pipe.txt"]) == (faults, "x/pipe.txt")
    for kind, fault in zip(kinds, faults, strict=True):
        for errors in ("fail", "skip"):
            said = refusal(find_files, [str(folder / f"{kind}.txt")], problems=Problems(errors))
            assert f"1 of 1 files cannot be read\n  {fault}" in said


def test_a_glob_finds_what_its_folder_has(tmp_path: Path) -> None:
    """Without what is set aside by its name, unless the user names it."""
    for name in ("a.txt", "_b.txt", "_old/c.txt", "deep/_d.txt", "deep/e.txt"):
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "x" / name, TEXT + name)

    def find(*parts: str) -> tuple[list[str], int]:
        problems = Problems("fail")
        files = find_files([str(tmp_path.joinpath("x", *parts))], problems=problems)
        return sorted(Path(file.path).name for file in files), problems.no_text.total()

    whole = ["a.txt", "e.txt"]
    assert find() == find("*") == (whole, 3)
    assert find("**", "*.txt")[0] == whole
    assert find("_b.txt") == find("_b*") == (["_b.txt"], 0)
    assert find("_old", "*") == find("_*", "*") == find("_old") == (["c.txt"], 0)


@pytest.mark.timeout(20)
def test_links_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT)
    for name, target in {"b": "c", "c": "b", "self": "."}.items():
        (tmp_path / name).symlink_to(target)
    too_many = "cannot be read: Too many levels of symbolic links"
    cure = "--errors skip leaves it out and lists it"
    assert refusal(find_files, [str(tmp_path)]) == f"--docs: {tmp_path}/b: {too_many}\n{cure}"
    problems = Problems("skip")
    assert [file.name for file in find_files([str(tmp_path)], problems=problems)] == ["a.txt"]
    assert problems.skipped == [f"{tmp_path}/{name}: {too_many}" for name in "bc"]
    assert_refusal(too_many, find_files, [str(tmp_path / "b")])
    said = f"no file that can be read; such as .*{too_many}"
    assert_refusal(said, find_files, [str(tmp_path / "b")], problems=Problems("skip"))


def test_files_and_folders_that_cannot_be_opened_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    (folder / "closed").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "closed/c.txt"):
        write(folder / name, TEXT + name)
    scan = os.scandir

    def refuse(path: str, *arguments: object, **options: object) -> object:
        if str(path).endswith(("b.txt", "closed")):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path) if os.path.isdir(path) else open(path, "rb")

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(cutting, "open", refuse, raising=False)
    denied = "cannot be read: Permission denied"
    for given, named in ((folder, "closed"), (folder / "b.txt", "b.txt")):
        said = f"{folder / named}: {denied}\n--errors skip leaves it out and lists it"
        assert_refusal(said, find_files, [str(given)])
    problems = Problems("skip")
    assert [file.name for file in find_files([str(folder)], problems=problems)] == ["a.txt"]
    assert problems.skipped == [f"{folder}/closed: {denied}", f"{folder}/b.txt: {denied}"]
    assert problems.names[f"{folder}/closed"] == "x/closed"


def test_what_links_bring_out_of_the_output_folder(tmp_path: Path) -> None:
    for place in ("x/a.txt", "out/b.txt", "out/deep/c.txt"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / place, TEXT + place)
    (tmp_path / "x" / "link.txt").symlink_to("../out/b.txt")
    (tmp_path / "x" / "folder").symlink_to("../out/deep")
    assert [file.name for file in find_files([str(tmp_path / "x")], out=tmp_path / "out")] == ["a.txt"]
    assert_refusal("no file with anything in it", find_files, [str(tmp_path / "out/*.txt")], out=tmp_path / "out")


def test_the_output_folder_is_not_within_the_text(tmp_path: Path) -> None:
    """Or the next run would read what this one has written."""
    (tmp_path / "x").mkdir()
    write(tmp_path / "x" / "a.txt", TEXT)
    (tmp_path / "link").symlink_to("x")
    for docs, out in (("x", "x"), ("x", "x/deep/out"), ("link", "x/out"), ("x", "link/out"), ("*", "x/out")):
        said = f"--out {tmp_path / out}: lies within --docs"
        assert_refusal(said, find_files, [str(tmp_path / docs)], out=tmp_path / out)
    assert len(find_files([str(tmp_path / "x")], out=tmp_path / "xy")) == 1
    (tmp_path / "x" / "out").mkdir()  # by an earlier run of the same command
    write(tmp_path / "x" / "out" / "shards", TEXT)
    assert len(find_files([str(tmp_path / "x" / "*")], out=tmp_path / "x" / "out")) == 1


def test_a_key_is_the_hash_of_size_head_and_tail(tmp_path: Path) -> None:
    """Of a file that is copied or touched too."""
    for size in (0, 1, EDGE, EDGE + 1, 2 * EDGE, 3 * EDGE + 5):
        data = os.urandom(size)
        path = write(tmp_path / "x", data)
        os.utime(path, (1, 1))
        key = hashlib.sha256(b"%d " % size + data[:EDGE] + data[max(EDGE, size - EDGE) :]).hexdigest()[:16]
        assert read_ends(path, size).content == key
        assert read_ends(str(path), size + 1).content != key


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_the_key_that_goes_with_a_file(tmp_path: Path, suffix: str) -> None:
    data = b'{"text": "%s"}\n' % os.urandom(100_000).hex().encode()
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b"\xef\xbb\xbf" + data))
    (file,) = find_files([str(path)])
    seen = read_ends(path, path.stat().st_size)
    assert file.size == path.stat().st_size
    assert (seen.head, seen.content, seen.is_damaged) == (data[:16384], file.content, False)


def test_a_head_that_is_damaged(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(5000).hex().encode())
    path = write(tmp_path / "x.gz", data[:-2000])
    seen = read_ends(path, path.stat().st_size)
    assert seen.is_damaged
    assert 1000 < len(seen.head) < 10_000
    assert read_ends(write(path, data[:5]), 5).head == b""


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    fault = "none: cannot be read: No such file or directory\n--errors skip leaves"
    assert_refusal(fault, read_ends, tmp_path / "none", 9)
    (tmp_path / "x.gz").symlink_to("/proc/self/mem")
    assert_refusal(r"x.gz: cannot be read: Input/output error", read_ends, tmp_path / "x.gz", 9)


Sources = list[SourceFile]


def of_size(folder: Path, *sizes: int, format: str = "sentences", source: str = "x", suffix: str = "") -> Sources:
    """Makes files of these sizes, which take no room on the disk."""
    files = []
    for number, size in enumerate(sizes):
        path = folder / f"{source}{number}{suffix}"
        path.touch()
        os.truncate(path, size)
        files.append(SourceFile(source, str(path), path.name, size, format))
    return files


SIZES = [(1,), (5 << 20, 3, 0, 70 << 20, 1 << 20), (100,) * 300, ((1 << 31) + 7, 10), ((1 << 20) + 1,) * 9]


@pytest.mark.parametrize("sizes", SIZES, ids=sum)
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_every_byte_is_in_exactly_one_span(tmp_path: Path, sizes: tuple[int, ...], suffix: str) -> None:
    files = of_size(tmp_path, *sizes, suffix=suffix, format="mediawiki")
    bundles = make_bundles(files)
    spans = [span for bundle in bundles for span in bundle.spans]
    assert list(dict.fromkeys(span.path for span in spans)) == [file.path for file in files if file.size]
    for file in files:
        own = [span for span in spans if span.path == file.path]
        assert [span.start for span in own[1:]] == [span.end for span in own[:-1]]
        assert not own or (own[0].start, own[-1].end) == (0, file.size)
        assert suffix != ".gz" or len(own) == (1 if file.size else 0)
    assert len({bundle.name for bundle in bundles}) == len(bundles)
    assert all(bundle.spans for bundle in bundles)


def test_bundles_are_of_one_source_and_format_and_some_size(tmp_path: Path) -> None:
    files = of_size(tmp_path, *[1000] * 50, source="a") + of_size(tmp_path, 90 << 20, source="b")
    files += of_size(tmp_path, *[1000] * 5, source="b", format="text", suffix=".txt")
    bundles = make_bundles(files)
    found = [(bundle.source, bundle.format) for bundle in bundles]
    assert list(dict.fromkeys(found)) == [("a", "sentences"), ("b", "sentences"), ("b", "text")]
    assert found.count(("a", "sentences")) == found.count(("b", "text")) == 1
    assert found.count(("b", "sentences")) == 90 // 2  # of 2 MiB: 24 bundles or more, of a power of two
    assert sum(bundle.weight for bundle in bundles) == pytest.approx(sum(file.size for file in files), rel=0.001)
    assert make_bundles(files) == bundles


def test_row_groups_are_divided_and_large_corpora_have_bundles_of_16_mib(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(1000)]}), path, row_group_size=90)
    (bundle,) = make_bundles(find_files([str(path)], None))
    assert [(span.start, span.end) for span in bundle.spans] == [(number, number + 1) for number in range(12)]
    bundles = make_bundles(of_size(tmp_path, 1 << 35))
    assert ({bundle.part_bytes for bundle in bundles}, len(bundles)) == ({16 << 20}, 1 << 11)


def test_demo_reads_documentation_strings(tmp_path: Path) -> None:
    first, second = "This module does a number of things that are described here.", "It does them well. " * 12
    function = 'def f():\n    """Does the one thing that it is for."""\n'
    path = write(tmp_path / "module.py", f'"""{first}\n\n    >>> code\n\n{second}"""\nx = 1\n{function}')
    (document,) = read(path, "demo")[0]
    assert document.title == "module"
    assert document.passages == [first, second.strip(), "Does the one thing that it is for."]
    assert read(write(tmp_path / "short.py", '"""Too short."""'), "demo")[0] == []


def test_the_demo_is_every_second_module_of_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for tests, and for packages of another Python inside it."""
    for name in "a.py b.py c/d.py e.py h.txt c/site-packages/f.py test/g.py c/tests/h.py".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, f"x = '{name}'")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert demo.halves() == ([tmp_path / "a.py", tmp_path / "c/d.py"], [tmp_path / "b.py", tmp_path / "e.py"])
    found = find_files(["demo"])
    assert [(file.source, file.format, Path(file.path)) for file in found] == [
        ("demo", "demo", p) for p in demo.files()
    ]
    assert all(file.name.count("/") == 2 for file in found)
