"""Cutting files into spans and records: each exactly once, in bounded time and memory, also of compressed files."""

import bz2
import gzip
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, refusal
from support.marks import slow
from support.reading import COMPRESS, passages, read, write
from support.watches import MemoryWatch

from data_prep.common.errors import UserError
from data_prep.common.files import BLOCK
from data_prep.readers import compression, cutting
from data_prep.readers.cutting import HEAD, read_content, read_ends
from data_prep.readers.formats import jsonl, mediawiki, sentences, wikiextractor
from data_prep.readers.reader import Problems, Span, UnreadableError

OPENINGS = [mediawiki.OPENING, wikiextractor.OPENING, jsonl.OPENING, sentences.OPENING]


def pieces(content: bytes, opening: re.Pattern[bytes]) -> list[tuple[int, bytes]]:
    """Cuts content into records in the plainest way: where the groups of all matches begin."""
    if not content:
        return []
    first = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    starts = [first, *(match.start(1) for match in opening.finditer(content) if match.start(1) > first)]
    return [(start, content[start:end]) for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]


def records(span: Span, opening: Any) -> Iterator[tuple[int, bytes]]:
    return cutting.records(span, opening, Problems("fail"), jsonl.CLOSING)


MARKS = b'\n|\n|\r\n|\n\n|\n \t\n| |\t|<doc |<doc id=|</doc>\n|<page>|<page |</page>|<pag|{"a"|word|\xef\xbb\xbf'
FRAGMENTS = st.sampled_from([*MARKS.split(b"|"), b"\n" * 9, b" " * 70 + b"\n", b"\t" * 101, b"x" * 300])
CONTENT = st.builds(b"".join, st.lists(st.one_of(FRAGMENTS, st.binary(max_size=4)), max_size=60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one folder for all the examples that a property is tested with."""
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda opening: opening.pattern.decode())
@given(content=CONTENT, block=st.sampled_from([3, 50, 300, 1 << 20]), step=st.integers(1, 2000), mark=st.booleans())
@example(content=b"<page>", block=3, step=1, mark=True)
@settings(max_examples=60)
def test_each_record_is_in_exactly_one_span(
    folder: Path, opening: re.Pattern[bytes], content: bytes, block: int, step: int, mark: bool
) -> None:
    path = write(folder / "plain", b"\xef\xbb\xbf" + content if mark else content)
    step = max(step, path.stat().st_size // 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK", block)
        spans = cutting.ranges(path, step)
        found = [record for span in spans for record in records(span, opening)]
    assert found == pieces(path.read_bytes(), opening)


CUTS = st.lists(st.integers(0, 3000), max_size=8, unique=True)
BLOCKS = st.sampled_from([3, 50, 1 << 20])


@given(content=CONTENT, cuts=CUTS, block=BLOCKS, step=st.integers(1, 600), empty=st.integers(0, 3))
@example(content=b"<page>a", cuts=[], block=50, step=1, empty=0)
@example(content=b"\xef\xbb\xbf", cuts=[1], block=3, step=1, empty=1)
@settings(max_examples=120)
def test_pages_are_found_once_whatever_streams_they_lie_in(
    folder: Path, content: bytes, cuts: list[int], block: int, step: int, empty: int
) -> None:
    ends = [*sorted(cuts), len(content)]
    parts = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    parts.insert(min(empty, len(parts)), b"")
    path = write(folder / "streams.bz2", b"".join(bz2.compress(part) for part in parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK", block)
        spans = cutting.bz2_ranges(path, 4 * max(step, path.stat().st_size // 60))
        assert (spans[0].start, spans[-1].end) == (0, path.stat().st_size)
        found = [record for span in spans for _, record in records(span, mediawiki.OPENING)]
    # No file begins with an empty stream, or with a piece of a byte-order mark. What is before the first page may get
    # lost there, or the mark may stay.
    expected = [record for _, record in pieces(content, mediawiki.OPENING)]
    if not parts[0] or (len(parts[0]) < 3 and content.startswith(cutting.BYTE_ORDER_MARK)):
        found, expected = ([one for one in records if one.startswith(b"<page")] for records in (found, expected))
    assert found == expected or not content


class CountingOpening:
    """The opening of JSON lines, which knows how much has been searched for it, and in which buffers."""

    def __init__(self) -> None:
        self.searched, self.buffers = 0, set[int]()

    def finditer(self, buffer: bytearray, start: int) -> Iterator[re.Match[bytes]]:
        self.searched += len(buffer) - start
        self.buffers.add(id(buffer))
        return jsonl.OPENING.finditer(buffer, start)


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_long_records_are_searched_once(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, block = 500_000, 2_000
    path = write(tmp_path / f"x{suffix}", COMPRESS[suffix](random.Random(1).randbytes(size).replace(b"\n", b" ")))
    monkeypatch.setattr(cutting, "BLOCK", block)
    opening = CountingOpening()
    (record,) = records(Span(str(path), 0, path.stat().st_size), opening)
    assert len(record[1]) == size
    assert opening.searched < 1.2 * size + 1000 * cutting.CONTEXT
    assert len(opening.buffers) == 1  # it grows in its place


def test_spans_within_a_long_record_do_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, block = 1_000_000, 1000
    path = write(tmp_path / "x", b" " * size + b"\n{}\n")
    monkeypatch.setattr(cutting, "BLOCK", block)
    opening = CountingOpening()
    found = [record for span in cutting.ranges(path, 10_000) for record in records(span, opening)]
    assert [len(record) for _, record in found] == [size + 1, 3]
    assert opening.searched < 4 * size


def test_blocks_of_a_bz2_bomb_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.bz2", bz2.compress(bytes(20_000_000)))
    monkeypatch.setattr(cutting, "BLOCK", 1000)
    blocks = cutting._blocks(Span(str(path), 0, path.stat().st_size))
    assert all(len(next(blocks)[0]) <= 1000 for _ in range(50))


def test_a_dump_in_one_stream_is_not_searched_from_every_span(tmp_path: Path) -> None:
    path = write(tmp_path / "x.xml.bz2", bz2.compress(random.Random(1).randbytes(BLOCK + 100_000)))
    with path.open("rb") as file:
        reading = Mock(wraps=file)
        assert cutting._next_stream(reading, Span(str(path), 1000, 2000)) is None
    assert sum(call.args[0] for call in reading.read.mock_calls) <= BLOCK


def test_a_record_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LARGEST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(cutting, "BLOCK", 1 << 16)
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' + b"x" * (2 << 20))
    assert_refusal(r"x.jsonl: byte 14: a record of more than 1 MB\ncut it up; --errors skip", read, path, "jsonl")


def test_a_document_of_20_mb_on_one_line(tmp_path: Path) -> None:
    around = {"jsonl": ('{"text": "', '"}\n'), "wikiextractor": ('<doc id="1" title="A">\n', "\n</doc>\n")}
    for format, (before, after) in {**around, "sentences": ("", "")}.items():
        path = write(tmp_path / "x", before.encode() + b"word " * 4_000_000 + after.encode())
        assert [[*map(len, document)] for document in passages(path, format)] == [[19_999_999]]


LINE = b'{"text": "%s"}\n' % (b"a " * 500)


def content(path: Path) -> bytes:
    return b"".join(read_content(path))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("block", [7, 1000, 1 << 20])
def test_streams_one_after_another_are_read_to_the_end(
    tmp_path: Path, suffix: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "BLOCK", block)
    draw = random.Random(1)
    parts = [draw.randbytes(draw.choice((0, 1, 300, 3000 * min(block, 30)))).hex().encode() for _ in range(12)]
    path = write(tmp_path / f"x{suffix}", b"".join(COMPRESS[suffix](part) for part in parts))
    assert content(path) == b"".join(parts)
    assert all(0 < len(piece) <= block for piece in read_content(path))


def test_what_other_programs_put_between_streams(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    zst = skippable + COMPRESS[".zst"](b"one ") + skippable + COMPRESS[".zst"](b"two") + skippable
    assert content(write(tmp_path / "x.zst", zst)) == b"one two"
    padded = gzip.compress(b"one ") + gzip.compress(b"two") + bytes(100_000)
    for more, expected in {b"": b"one two", gzip.compress(b""): b"one two", gzip.compress(b"!"): b"one two!"}.items():
        assert content(write(tmp_path / "x.gz", padded + more)) == expected
    assert content(write(tmp_path / "x.gz", gzip.compress(b""))) == b""


def test_without_its_package_zst_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with `--errors skip`: no file is left out because a package is missing."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert content(write(tmp_path / "x.gz", gzip.compress(b"one"))) == b"one"
    with pytest.raises(UserError, match="pip install zstandard") as refused:
        content(write(tmp_path / "x.zst", COMPRESS[".zst"](b"one")))
    assert not isinstance(refused.value, UnreadableError)


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_the_longest_window_of_zstd(tmp_path: Path) -> None:
    text = b'{"text": "a line of many"}\n' * 1000
    command = ["zstd", "-q", "--long=31", "-o", str(tmp_path / "x.jsonl.zst")]
    subprocess.run(command, input=text, check=True)  # of no known size, so the window is 2 GB
    head = (tmp_path / "x.jsonl.zst").read_bytes()[:32]
    assert zstandard.get_frame_parameters(head).window_size == compression.LARGEST_WINDOW
    assert content(tmp_path / "x.jsonl.zst") == text
    assert len(read(tmp_path / "x.jsonl.zst", "jsonl")[0]) == 1000


def bomb(folder: Path, suffix: str, lines: int) -> Path:
    """Makes a small file that expands to far more; the streams of bz2 and .zst are made once and repeated."""
    if suffix == ".gz":
        return write(folder / "x.jsonl.gz", gzip.compress(LINE * lines))
    return write(folder / f"x.jsonl{suffix}", COMPRESS[suffix](LINE * 1000) * (lines // 1000))


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".xz"), slow(".zst")])
def test_a_bomb_is_refused(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "EXPANDS_FREELY", 1 << 20)
    path = bomb(tmp_path, suffix, 5_000)
    assert len(read_ends(path, path.stat().st_size).head) == HEAD
    what, cure = refusal(read, path, "jsonl").split("\n")
    most = "as a bomb does; the most for a text is 0.001 GB and 200 times the size"
    assert re.match(f"{path}: expands to more than .*{most}", what)
    assert cure == "if it is text, unpack it; --errors skip keeps what comes before and lists the file"
    documents, problems = read(path, "jsonl", "skip")
    assert 900 < len(documents) < 5_000
    assert problems.skipped == [what]
    plain = write(tmp_path / "x.jsonl", LINE * 5_000)  # unpacked, as the cure says
    assert len(read(plain, "jsonl")[0]) == 5_000


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".xz"), ".zst"])
def test_text_that_comes_again_is_no_bomb(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a robot: the same sentences with other names and numbers, and a page that comes twice."""
    monkeypatch.setattr(compression, "EXPANDS_FREELY", 0)
    draw = random.Random(1)
    page = "{} is a village in the commune of {} in northern Sweden. It had {} inhabitants in {}; it lies on a river.\n"
    towns = [draw.randbytes(4).hex() for _ in range(50)]
    pages = "".join(page.format(draw.choice(towns), draw.choice(towns), n, 1900 + n % 100) for n in range(10_000))
    data = (pages * 2).encode()
    path = write(tmp_path / f"x{suffix}", COMPRESS[suffix](data))
    assert content(path) == data


@pytest.mark.parametrize("suffix", [*map(slow, (".gz", ".bz2", ".xz", ".zst"))])
def test_a_bomb_takes_little_memory(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One record of a gigabyte, or as much of it as is expanded before it is refused."""
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](bytes(1 << 24)) * 64)
    monkeypatch.setattr(cutting, "LARGEST_DOCUMENT", 1 << 24)
    monkeypatch.setattr(compression, "EXPANDS_FREELY", 1 << 28)
    with MemoryWatch() as memory:
        documents, problems = read(path, "jsonl", "skip")
    assert (documents, len(problems.skipped)) == ([], 2)
    assert "as a bomb does" in problems.skipped[1]
    assert memory.most < 150e6


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".xz"), ".zst"])
def test_blocks_of_any_size_give_the_text_before_a_cut(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = COMPRESS[suffix](b"a " * 100_000 + random.Random(1).randbytes(200_000).hex().encode())
    for cut in (60, 100, 150, len(data) // 100, len(data) * 2 // 3, len(data) - 8, len(data) - 1):
        path = write(tmp_path / f"x{suffix}", data[:cut])
        found = []
        for block in (100, 1 << 16, 1 << 22):
            pieces: list[bytes] = []
            monkeypatch.setattr(cutting, "BLOCK", block)
            assert_refusal("it does not end", pieces.extend, read_content(path))
            found.append(b"".join(pieces))
        assert found[0] == found[1] == found[2]
