"""What is said of damaged files and of bytes that are no text, and what --errors skip saves of them."""

import bisect
import bz2
import gzip
import itertools
import pickle
import random
import re
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, refusal
from support.marks import slow
from support.reading import COMPRESS, in_streams, many_pages, page, read, wiki_dump, write

from data_prep.common.errors import UserError
from data_prep.readers import cutting
from data_prep.readers.formats import mediawiki
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Document, Options, Problems, Span, UnreadableError
from data_prep.readers.sources import find_files, make_bundles


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("fault", ["cut", "garbage after it", "no such thing"])
def test_damaged_compressed_files(tmp_path: Path, suffix: str, fault: str) -> None:
    """Of JSON lines, those before the damage are saved; of a book nothing."""
    data = COMPRESS[suffix](b'{"text": "%s"}\n' % random.Random(1).randbytes(100_000).hex().encode())
    faults = {"cut": data[:-20], "garbage after it": data + b"garbage, garbage", "no such thing": b"plain text\n" * 9}
    path = write(tmp_path / f"x.jsonl{suffix}", faults[fault])
    said = f"{path}: truncated or damaged {suffix}: "
    for errors in ("fail", "replace"):
        assert re.match(rf"{said}[\s\S]*--errors skip", refusal(read, path, "jsonl", errors))
    for format, saved in (("jsonl", fault == "garbage after it"), ("text", False)):
        documents, problems = read(path, format, "skip")
        assert len(documents) == saved
        (left_out,) = problems.skipped
        assert left_out.startswith(f"{said}the stream at byte ")


def test_the_damaged_stream_is_named(tmp_path: Path) -> None:
    streams = [bz2.compress(part.encode()) for part in many_pages(40)]
    at = sum(map(len, streams[:30]))
    path = tmp_path / "x.xml.bz2"
    span = Span(str(path), len(streams[0]) * 20, at - 5)
    cut, spoilt = b"".join(streams[:31])[:-100], b"".join(streams[:30]) + b"garbage" + streams[31]
    for content, fault in ((cut, "it does not"), (spoilt, "Invalid data")):
        write(path, content)
        found = cutting.records(span, mediawiki.OPENING, Problems("fail"), mediawiki.CLOSING)
        assert_refusal(rf"x.xml.bz2: truncated .* stream at byte {at:,}: {fault}", list, found)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_bytes_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    lines = b'{"text": "good", "id": "a"}\n{"text": "caf\xe9", "id": "b"}\n{"text": "fine", "id": "c"}\n'
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](lines))
    place = f"{path}: byte {lines.index(0xE9)}" + (" of the uncompressed text" if suffix else "")
    said = refusal(read, path, "jsonl")
    assert said.startswith(f"{place}: not UTF-8 (e9 22 2c 20)\nis it Latin-1? iconv -f latin1 -t utf-8 OLD > NEW; ")
    assert all(f"--errors {errors}" in said for errors in ("replace", "skip"))
    documents, problems = read(path, "jsonl", "replace")
    assert [document.passages for document in documents] == [["good"], ["caf\ufffd"], ["fine"]]
    assert (problems.num_replaced, problems.skipped) == (1, [])
    documents, problems = read(path, "jsonl", "skip")
    assert [document.id for document in documents] == ["a", "c"]
    assert problems.skipped == [f"{place}: not UTF-8 (e9 22 2c 20)"]


LATIN_1 = [
    ("text", b"A good line.\n\nA caf\xe9.\n", 0),
    ("sentences", b"One.\nTwo.\n\nA caf\xe9.\n\nThree.\n", 2),
    ("wikiextractor", b'<doc id="1" title="A">\nA\n\nText.\n</doc>\n<doc id="2" title="B">\ncaf\xe9\n</doc>\n', 1),
    ("mediawiki", wiki_dump(page("A", "Text."), page("B", "cafX.")).replace(b"cafX", b"caf\xe9"), 1),
]


@pytest.mark.parametrize(("format", "content", "kept"), LATIN_1)
def test_bytes_that_are_not_utf8_in_all_formats(tmp_path: Path, format: str, content: bytes, kept: int) -> None:
    path = write(tmp_path / "x.txt", content)
    assert_refusal(rf"x.txt: byte {content.index(0xE9)}: not UTF-8 \(e9", read, path, format)
    assert any("caf\ufffd" in text for document in read(path, format, "replace")[0] for text in document.passages)
    documents, problems = read(path, format, "skip")
    assert (len(documents), len(problems.skipped)) == (kept, 1)


def test_a_place_in_later_streams_says_from_where_it_counts(tmp_path: Path) -> None:
    content = wiki_dump(*many_pages(99), page("Bad", "cafX")).replace(b"cafX", b"caf\xe9")
    path = write(tmp_path / "x.xml.bz2", in_streams(content, 4000))
    place = r"byte [\d,]+ of the uncompressed text in the streams from byte [\d,]+ on: not"
    assert_refusal(place, read, path, "mediawiki", step=40_000)


JSONL = list_readers()["jsonl"]


def json_lines(count: int) -> list[bytes]:
    draw = random.Random(1)
    return [b'{"text": "%s", "id": "%d"}\n' % (draw.randbytes(60).hex().encode(), n) for n in range(count)]


def all_of(path: Path, problems: Problems) -> list[Document]:
    """Reads a file as shard.py does: from finding out what it is to its documents."""
    options = Options(problems)
    bundles = make_bundles(find_files([str(path)], problems=problems))
    return [d for bundle in bundles for span in bundle.spans for d in list_readers()[bundle.format].read(span, options)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes one folder for all the examples that a property is tested with."""
    return tmp_path_factory.mktemp("cut")


@pytest.mark.parametrize("suffix", [".gz", slow(".bz2"), slow(".zst")])
@settings(max_examples=50)
@given(place=st.floats(0, 1), long=st.booleans())
def test_a_file_cut_anywhere_gives_the_documents_before(folder: Path, suffix: str, place: float, long: bool) -> None:
    lines, size = (json_lines(1000), 250) if long else (json_lines(40), 7)
    streams = [COMPRESS[suffix](b"".join(lines[at : at + size])) for at in range(0, len(lines), size)]
    data = b"".join(streams)
    cut = round(place * len(data))
    ends = [0, *itertools.accumulate(map(len, streams))]
    problems = Problems("skip")
    path = write(folder / f"x.jsonl{suffix}", data[:cut])
    found: list[str] = []
    with suppress(UserError) if cut < ends[1] else nullcontext():  # of which nothing may be read
        found = [document.id for document in all_of(path, problems)]
    assert found == [str(number) for number in range(len(found))]
    assert len(found) >= min((bisect.bisect(ends, cut) - 1) * size, len(lines))  # all of the streams that are whole
    assert cut in ends or not found or len(problems.skipped) == 1


def test_a_record_is_kept_that_is_whole_before_the_cut(tmp_path: Path) -> None:
    """The damage comes between two streams, so the text before it ends with a whole record."""
    doc = '<doc id="{}" title="A">\nA\n\nSome text.\n</doc>\n'
    cases = {"sentences": ["One.\nTwo.\n\n", "Three.\nFour.\n\n"], "mediawiki": many_pages(2)}
    cases |= {"jsonl": ['{"text": "a"}\n', '{"text": "b"}\n'], "wikiextractor": [doc.format(1), doc.format(2)]}
    for format, records in cases.items():
        head = wiki_dump().decode().partition("</mediawiki>")[0] if format == "mediawiki" else ""
        content = (head + "".join(records)).encode()
        path = write(tmp_path / "x.gz", gzip.compress(content) + gzip.compress(b"more")[:10])
        documents, problems = read(path, format, "skip")
        assert (len(documents), len(problems.skipped)) == (2, 1), (format, problems.skipped)
        documents, _ = read(write(path, gzip.compress(content.rstrip()[:-1]) + b"garbage"), format, "skip")
        assert len(documents) == 1, format


def test_a_dump_with_a_damaged_stream_goes_on_in_the_next_span(tmp_path: Path) -> None:
    content = bytearray(in_streams(wiki_dump(*many_pages(200)), 5000))
    at = content.index(b"BZh9", len(content) // 2)
    content[at + 20 : at + 300] = bytes(280)
    path = write(tmp_path / "x.xml.bz2", bytes(content))
    documents, problems = read(path, "mediawiki", "skip", step=20_000)
    assert 180 < len(documents) < 200
    assert documents[-1].title == "T199"
    assert f"{path}: truncated or damaged .bz2: the stream at byte {at:,}: Invalid data stream" in problems.skipped


def test_files_that_shrink_meanwhile(tmp_path: Path) -> None:
    lines = json_lines(100)
    for suffix in ("", ".gz"):
        path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b"".join(lines)))
        (span,) = JSONL.spans(path, 1 << 20)
        write(path, COMPRESS[suffix](b"".join(lines[:50])))
        said, problems = r"shorter since the run began\nbegin anew; --errors skip keeps", Problems("skip")
        assert_refusal(said, list, JSONL.read(span, Options(Problems("fail"))))
        assert len(list(JSONL.read(span, Options(problems)))) == 50
        assert problems.skipped[0].endswith(" bytes: it has become shorter since the run began")


def test_a_fault_that_all_spans_of_a_file_meet_is_listed_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b"".join(json_lines(100)))
    spans = JSONL.spans(path, 1000)
    path.unlink()
    options = Options(Problems("skip"))
    assert len(spans) > 3
    assert [document for span in spans for document in JSONL.read(span, options)] == []
    assert options.problems.skipped == [f"{path}: cannot be read: No such file or directory"]


@pytest.mark.parametrize("format", list_readers())
def test_files_that_cannot_be_read(tmp_path: Path, format: str) -> None:
    """One is gone, the other the memory of a process: a file whose first bytes give EIO."""
    for suffix in ("", ".gz", ".bz2", ".zst"):
        (tmp_path / f"x{suffix}").symlink_to("/proc/self/mem")
        for name, fault in (("none", "No such file or directory"), ("x", "Input/output error")):
            span = Span(f"{tmp_path}/{name}{suffix}", 0, 9)
            said = rf"{name}{suffix}: (cannot be read|not a whole file): .*{fault}"
            assert_refusal(said, list, list_readers()[format].read(span, Options(Problems("fail"))))
            problems = Problems("skip")
            assert list(list_readers()[format].read(span, Options(problems))) == []
            assert len(problems.skipped) == 1


def test_a_record_that_is_too_long_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.readers.cutting.LARGEST_DOCUMENT", 10_000)
    monkeypatch.setattr("data_prep.readers.cutting.BLOCK", 1000)
    lines = json_lines(90)
    lines[40] = b'{"text": "%s"}\n' % (b"x" * 50_000)
    for suffix in ("", ".gz"):
        path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b"".join(lines)))
        for step in (1 << 20, 700):
            documents, problems = read(path, "jsonl", "skip", step=step)
            assert [document.id for document in documents] == [str(number) for number in range(90) if number != 40]
            assert len(problems.skipped) == 1
            assert f"byte {sum(map(len, lines[:40])):,}" in problems.skipped[0]
    documents, problems = read(write(tmp_path / "x.txt", "word " * 3000), "text", "skip")
    assert (documents, len(problems.skipped)) == ([], 1)


# Parquet


def parquet(path: Path, texts: list[str], has_ids: bool = True, **options: object) -> Path:
    ids = {"id": [str(number) for number in range(len(texts))]} if has_ids else {}
    pq.write_table(pa.table({**ids, "text": texts}), path, row_group_size=100, **options)
    return path


@pytest.mark.parametrize("has_ids", [False, True])
def test_damaged_row_groups_are_left_out(tmp_path: Path, has_ids: bool) -> None:
    path = parquet(tmp_path / "x.parquet", [f"text {number} ." for number in range(1000)], has_ids)
    content = bytearray(path.read_bytes())
    metadata = pq.read_metadata(path)
    for group in (0, 4):
        column = metadata.row_group(group).column(metadata.num_columns - 1)
        start = column.dictionary_page_offset or column.data_page_offset
        content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    write(path, bytes(content))
    assert_refusal(r"row group 0: damaged: [\s\S]*\n--errors skip leaves", read, path, "parquet")
    problems = Problems("skip")
    assert len(all_of(path, problems)) == (800 if has_ids else 8)
    places = [fault.partition(": damaged: ")[0] for fault in problems.skipped]
    assert places == [f"{path}: row group 0", f"{path}: row group 4"]


@settings(max_examples=60)
@given(kind=st.sampled_from(["parquet", "arrow"]), at=st.floats(0, 1), value=st.integers(0, 255))
def test_tables_with_any_byte_changed_end_in_no_fault_of_ours(folder: Path, kind: str, at: float, value: int) -> None:
    path = folder / f"whole.{kind}"
    if not path.exists():
        table = pq.read_table(parquet(folder / "whole.parquet", [f"text {n}.\nMore of it." for n in range(300)]))
        if kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table, max_chunksize=100)
    content = bytearray(path.read_bytes())
    content[round(at * (len(content) - 1))] = value
    with suppress(UserError):
        all_of(write(folder / f"changed.{kind}", bytes(content)), Problems("skip"))


def test_pages_are_checked_where_they_have_checksums(tmp_path: Path) -> None:
    texts = ["".join(random.Random(number).choices("abcdefgh", k=90)) for number in range(300)]
    path = parquet(tmp_path / "x.parquet", texts, compression="none", write_page_checksum=True, use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(texts[150].encode(), b"x" * 90))
    problems = Problems("skip")
    assert (len(all_of(path, problems)), len(problems.skipped)) == (200, 1)


def test_the_footer_of_parquet_is_parsed_once_for_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "x.parquet", [f"text {number}" for number in range(3000)])
    opening = Mock(wraps=pq.ParquetFile)
    monkeypatch.setattr(pq, "ParquetFile", opening)
    assert len(all_of(path, Problems("fail"))) == 3000
    assert opening.call_count == 1
    parquet(path, ["another text"] * 10)  # which is seen, though its name is the same
    assert len(all_of(path, Problems("fail"))) == 10


def test_a_row_group_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a " * 3_000_000, "b"]}), path, compression="zstd")
    monkeypatch.setattr("data_prep.readers.compression.EXPANDS_FREELY", 1 << 20)
    problems = Problems("skip")
    assert all_of(path, problems) == []
    assert re.search("row group 0: .*as a bomb does", problems.skipped[0])
    monkeypatch.setattr("data_prep.readers.compression.EXPANDS_FREELY", 1 << 30)
    monkeypatch.setattr("data_prep.readers.cutting.LARGEST_DOCUMENT", 1 << 20)
    problems = Problems("skip")
    assert [document.passages for document in all_of(path, problems)] == [["b"]]
    assert problems.skipped == [f"{path}: row group 0, row 0: a document of more than 1 MB"]


def test_the_error_says_the_same_after_it_came_from_a_worker() -> None:
    error = UnreadableError("x: what", "cure")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "x: what\ncure"
    assert again.what == "x: what"
