"""Cutting files into spans and records: every record is found exactly once, in bounded time and memory."""

from __future__ import annotations

import bz2
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.reading import COMPRESS, passages, read, write

from data_prep.common.errors import UserError
from data_prep.common.files import BLOCK
from data_prep.readers import cutting, jsonlines, mediawiki, sentences, wikiextractor
from data_prep.readers.reader import Problems, Span

OPENINGS = [mediawiki.OPENING, wikiextractor.OPENING, jsonlines.OPENING, sentences.OPENING]


def pieces(content: bytes, opening: re.Pattern[bytes]) -> list[tuple[int, bytes]]:
    """Cuts content into records in the plainest way: where the groups of all matches begin."""
    if not content:
        return []
    first = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    starts = [first, *(match.start(1) for match in opening.finditer(content) if match.start(1) > first)]
    return [(start, content[start:end]) for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]


def records(span: Span, opening: Any) -> Iterator[tuple[int, bytes]]:
    return cutting.records(span, opening, Problems("fail"), jsonlines.CLOSING)


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
@settings(max_examples=60, deadline=None)
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


@given(
    content=CONTENT,
    cuts=st.lists(st.integers(0, 3000), max_size=8, unique=True),
    block=st.sampled_from([3, 50, 1 << 20]),
    step=st.integers(1, 600),
    empty=st.integers(0, 3),
)
@example(content=b"<page>a", cuts=[], block=50, step=1, empty=0)
@example(content=b"\xef\xbb\xbf", cuts=[1], block=3, step=1, empty=1)
@settings(max_examples=120, deadline=None)
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
        assert spans[0].start == 0
        assert spans[-1].end == path.stat().st_size
        found = [record for span in spans for _, record in records(span, mediawiki.OPENING)]
    # No file begins with an empty stream, or with a piece of a byte-order mark. What is before the first page may get
    # lost there, or the mark may stay.
    if not parts[0] or (len(parts[0]) < 3 and content.startswith(cutting.BYTE_ORDER_MARK)):
        assert [record for record in found if record.startswith(b"<page")] == [
            record for _, record in pieces(content, mediawiki.OPENING) if record.startswith(b"<page")
        ]
    elif content:
        assert found == [record for _, record in pieces(content, mediawiki.OPENING)]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_compressed_files_have_the_same_records(tmp_path: Path, suffix: str) -> None:
    content = b"".join(b'{"text": "line %d"}\n' % number for number in range(200_000))
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](content))
    (span,) = cutting.ranges(path, 1 << 16)
    assert list(records(span, jsonlines.OPENING)) == pieces(content, jsonlines.OPENING)


def test_members_one_after_another_are_all_read(tmp_path: Path) -> None:
    for suffix in (".gz", ".bz2", ".zst"):
        compress = COMPRESS[suffix]
        path = write(tmp_path / f"x.jsonl{suffix}", compress(b'{"text": "a"}\n{"te') + compress(b'xt": "b"}\n'))
        assert passages(path, "jsonl") == [["a"], ["b"]]


class CountingOpening:
    """The opening of JSON lines, which knows how much has been searched for it, and in which buffers."""

    def __init__(self) -> None:
        self.searched, self.buffers = 0, set[int]()

    def finditer(self, buffer: bytearray, start: int) -> Iterator[re.Match[bytes]]:
        self.searched += len(buffer) - start
        self.buffers.add(id(buffer))
        return jsonlines.OPENING.finditer(buffer, start)


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_a_long_record_is_neither_searched_nor_copied_again_and_again(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, block = 3_000_000, 10_000
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
    path = write(tmp_path / "x.xml.bz2", bz2.compress(random.Random(1).randbytes(3_000_000)))

    class Counting:
        at = count = 0

        def seek(self, at: int) -> None:
            self.at = at

        def read(self, size: int) -> bytes:
            self.count += size
            return path.read_bytes()[self.at : self.at + size]

    file = Counting()
    assert cutting._next_stream(file, Span(str(path), 1000, 2000)) is None  # type: ignore[arg-type]
    assert file.count <= BLOCK


def test_a_record_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LARGEST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(cutting, "BLOCK", 1 << 16)
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' + b"x" * (2 << 20))
    with pytest.raises(UserError, match=r"x.jsonl: byte 14: a record of more than 1 MB\ncut it up; --errors skip"):
        read(path, "jsonl")


@pytest.mark.parametrize(
    ("format", "before", "after"),
    [
        ("jsonl", '{"text": "', '"}\n'),
        ("wikiextractor", '<doc id="1" title="A">\n', "\n</doc>\n"),
        ("sentences", "", ""),
    ],
)
def test_a_document_of_100_mb_on_one_line(tmp_path: Path, format: str, before: str, after: str) -> None:
    size = 100_000_000 if format == "jsonl" else 20_000_000
    path = write(tmp_path / "x", before.encode() + b"word " * (size // 5) + after.encode())
    (document,) = passages(path, format)
    assert [len(passage) for passage in document] == [size - 1]
