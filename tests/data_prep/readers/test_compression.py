"""Compressed files of any kind are read to their end, and bombs are refused before they go off."""

from __future__ import annotations

import bz2
import gzip
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from support.marks import slow
from support.reading import COMPRESS, read, write

from data_prep.common.errors import UserError
from data_prep.readers import compression
from data_prep.readers.cutting import read_content
from data_prep.readers.identity import HEAD, look
from data_prep.readers.reader import UnreadableError

LINE = b'{"text": "%s"}\n' % (b"a " * 500)


def content(path: Path) -> bytes:
    return b"".join(read_content(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("block", [7, 1000, 1 << 20])
def test_streams_one_after_another_are_read_to_the_end(tmp_path: Path, suffix: str, block: int) -> None:
    draw = random.Random(1)
    parts = [draw.randbytes(draw.choice((0, 1, 3000, 90_000))).hex().encode() for _ in range(12)]
    path = write(tmp_path / f"x{suffix}", b"".join(COMPRESS[suffix](part) for part in parts))
    assert b"".join(read_content(path, block)) == b"".join(parts)
    assert all(0 < len(piece) <= block for piece in read_content(path, block))


def test_what_other_programs_put_between_streams(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    zst = skippable + COMPRESS[".zst"](b"one ") + skippable + COMPRESS[".zst"](b"two") + skippable
    assert content(write(tmp_path / "x.zst", zst)) == b"one two"
    padded = gzip.compress(b"one ") + gzip.compress(b"two") + bytes(100_000)
    assert content(write(tmp_path / "x.gz", padded)) == b"one two"
    assert content(write(tmp_path / "e.gz", gzip.compress(b""))) == b""
    padded += gzip.compress(b" three")
    assert content(write(tmp_path / "y.gz", padded)) == b"one two three"


def test_without_its_package_zst_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with `--errors skip`: no file is left out because a package is missing."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert content(write(tmp_path / "x.gz", gzip.compress(b"one"))) == b"one"
    with pytest.raises(UserError, match="pip install zstandard") as refused:
        content(write(tmp_path / "x.zst", COMPRESS[".zst"](b"one")))
    assert not isinstance(refused.value, UnreadableError)


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_the_longest_window_of_zstd(tmp_path: Path) -> None:
    text = b"".join(b'{"text": "line %d of many"}\n' % number for number in range(100_000))
    command = ["zstd", "-q", "--long=31", "-o", str(tmp_path / "x.jsonl.zst")]
    subprocess.run(command, input=text, check=True)  # of no known size, so the window is 2 GB
    head = (tmp_path / "x.jsonl.zst").read_bytes()[:32]
    assert zstandard.get_frame_parameters(head).window_size == compression.LARGEST_WINDOW
    assert content(tmp_path / "x.jsonl.zst") == text
    assert len(read(tmp_path / "x.jsonl.zst", "jsonl")[0]) == 100_000


def bomb(folder: Path, suffix: str, lines: int) -> Path:
    """Makes a small file that expands to far more; the streams of bz2 and .zst are made once and repeated."""
    if suffix == ".gz":
        return write(folder / "x.jsonl.gz", gzip.compress(LINE * lines))
    return write(folder / f"x.jsonl{suffix}", COMPRESS[suffix](LINE * 1000) * (lines // 1000))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_bomb_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "EXPANDS_FREELY", 1 << 20)
    path = bomb(tmp_path, suffix, 20_000)
    with pytest.raises(UserError) as caught:
        read(path, "jsonl")
    what, cure = str(caught.value).split("\n")
    assert what.startswith(f"{path}: the first ")
    assert "as a bomb does; the most for a text is 0.001 GB and 200 times the size" in what
    assert cure == "if it is text, unpack it; --errors skip keeps what comes before and lists the file"
    documents, problems = read(path, "jsonl", "skip")
    assert 900 < len(documents) < 20_000
    assert problems.skipped == [what]
    plain = write(tmp_path / "x.jsonl", LINE * 20_000)  # unpacked, as the cure says
    assert len(read(plain, "jsonl")[0]) == 20_000


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".xz"), ".zst"])
def test_text_with_much_that_comes_again_is_no_bomb(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a robot: the same sentences with other names and numbers, and a page that comes twice."""
    monkeypatch.setattr(compression, "EXPANDS_FREELY", 0)
    draw = random.Random(1)
    page = "{} is a village in the commune of {} in northern Sweden. It had {} inhabitants in {}; it lies on a river.\n"
    towns = [draw.randbytes(4).hex() for _ in range(50)]
    pages = "".join(page.format(draw.choice(towns), draw.choice(towns), n, 1900 + n % 100) for n in range(30_000))
    data = (pages * 2).encode()
    path = write(tmp_path / f"x{suffix}", COMPRESS[suffix](data))
    assert content(path) == data


def test_a_bomb_takes_little_memory(tmp_path: Path) -> None:
    """One record of a gigabyte, or as much of it as is expanded before it is refused, in a process of its own."""
    suffixes = (".gz", ".bz2", ".xz", ".zst")
    paths = [write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](bytes(1 << 24)) * 64) for suffix in suffixes]
    assert max(path.stat().st_size for path in paths) < 4 << 20
    code = (
        "import sys, resource; from pathlib import Path; from data_prep.readers import READERS, compression, cutting\n"
        "from data_prep.readers.reader import Options, Problems\n"
        "cutting.LARGEST_DOCUMENT, compression.EXPANDS_FREELY = 1 << 24, 1 << 28\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    problems = Problems('skip')\n"
        "    (span,) = READERS['jsonl'].spans(path, 1 << 20)\n"
        "    assert list(READERS['jsonl'].read(span, Options(problems))) == []\n"
        "    assert len(problems.skipped) == 2, problems.skipped\n"
        "    assert 'as a bomb does' in problems.skipped[1]\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150_000  # kilobytes


def test_the_head_of_a_bomb_is_read_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x.bz2", bz2.compress(bytes(50_000_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert len(look(path, path.stat().st_size).head) == HEAD
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".xz"), ".zst"])
def test_the_text_before_a_cut_is_the_same_in_blocks_of_any_size(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](b"a " * 100_000 + random.Random(1).randbytes(1_000_000).hex().encode())
    for cut in (60, 100, 150, len(data) // 100, len(data) * 2 // 3, len(data) - 8, len(data) - 1):
        path = write(tmp_path / f"x{suffix}", data[:cut])
        found = []
        for block in (100, 1 << 16, 1 << 22):
            pieces: list[bytes] = []
            with pytest.raises(UserError, match="it does not end"):
                pieces.extend(read_content(path, block))
            found.append(b"".join(pieces))
        assert found[0] == found[1] == found[2]
