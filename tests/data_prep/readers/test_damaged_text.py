"""What is said of damaged files and of bytes that are no text, whatever their format."""

from __future__ import annotations

import bz2
import random
import re
from pathlib import Path

import pytest
from support.reading import COMPRESS, in_streams, many_pages, page, read, wiki_dump, write

from data_prep.common.errors import UserError
from data_prep.readers import cutting, mediawiki
from data_prep.readers.reader import Problems, Span


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("fault", ["cut", "garbage after it", "no such thing"])
def test_damaged_compressed_files(tmp_path: Path, suffix: str, fault: str) -> None:
    data = COMPRESS[suffix](b'{"text": "%s"}\n' % random.Random(1).randbytes(100_000).hex().encode())
    faults = {"cut": data[:-20], "garbage after it": data + b"garbage, garbage", "no such thing": b"plain text\n" * 9}
    path = write(tmp_path / f"x.jsonl{suffix}", faults[fault])
    for errors in ("fail", "replace"):
        with pytest.raises(UserError, match=rf"x.jsonl\{suffix}: truncated or damaged \{suffix}: [\s\S]*--errors skip"):
            read(path, "jsonl", errors)
    documents, problems = read(path, "jsonl", "skip")
    assert len(documents) == (fault == "garbage after it")
    (left_out,) = problems.skipped
    assert left_out.startswith(f"{path}: truncated or damaged {suffix}: the stream at byte ")


@pytest.mark.parametrize("kept", [0.4, 0.75, 0.999])
@pytest.mark.parametrize("stream", [1 << 30, 20_000])
def test_a_truncated_dump_is_an_error_in_whatever_span(
    tmp_path: Path, kept: float, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "BLOCK", 4096)  # a look at the head must not meet the end
    whole = in_streams(wiki_dump(*many_pages()), stream)
    path = write(tmp_path / "cut.xml.bz2", whole[: int(len(whole) * kept)])
    with pytest.raises(UserError, match=r"cut.xml.bz2: truncated or damaged .bz2: ") as caught:
        read(path, "mediawiki", step=80_000)
    if stream == 20_000:
        assert re.search(r"the stream at byte \d[\d,]+: it does not end", str(caught.value))


def test_the_damaged_stream_is_named(tmp_path: Path) -> None:
    streams = [bz2.compress(part.encode()) for part in many_pages(40)]
    at = sum(map(len, streams[:30]))
    path = tmp_path / "x.xml.bz2"
    span = Span(str(path), len(streams[0]) * 20, at - 5)
    cut, spoilt = b"".join(streams[:31])[:-100], b"".join(streams[:30]) + b"garbage" + streams[31]
    for content, fault in ((cut, "it does not"), (spoilt, "Invalid data")):
        write(path, content)
        with pytest.raises(UserError, match=rf"x.xml.bz2: truncated .* stream at byte {at:,}: {fault}"):
            list(cutting.records(span, mediawiki.OPENING, Problems("fail"), mediawiki.CLOSING))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_bytes_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    lines = b'{"text": "good", "id": "a"}\n{"text": "caf\xe9", "id": "b"}\n{"text": "fine", "id": "c"}\n'
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](lines))
    place = f"{path}: byte {lines.index(0xE9)}" + (" of the uncompressed text" if suffix else "")
    with pytest.raises(UserError) as caught:
        read(path, "jsonl")
    cures = (
        "is it Latin-1? iconv -f latin1 -t utf-8 OLD > NEW; --errors replace reads on with U+FFFD; "
        "--errors skip leaves the document out and lists it"
    )
    assert str(caught.value) == f"{place}: not UTF-8 (e9 22 2c 20)\n{cures}"
    documents, problems = read(path, "jsonl", "replace")
    assert [document.passages for document in documents] == [["good"], ["caf\ufffd"], ["fine"]]
    assert (problems.num_replaced, problems.skipped) == (1, [])
    documents, problems = read(path, "jsonl", "skip")
    assert [document.id for document in documents] == ["a", "c"]
    assert problems.skipped == [f"{place}: not UTF-8 (e9 22 2c 20)"]


@pytest.mark.parametrize(
    ("format", "content", "kept"),
    [
        ("text", b"A good line.\n\nA caf\xe9.\n", 0),
        ("sentences", b"One.\nTwo.\n\nA caf\xe9.\n\nThree.\n", 2),
        ("wikiextractor", b'<doc id="1" title="A">\nA\n\nText.\n</doc>\n<doc id="2" title="B">\ncaf\xe9\n</doc>\n', 1),
        ("mediawiki", wiki_dump(page("A", "Text."), page("B", "cafX.")).replace(b"cafX", b"caf\xe9"), 1),
    ],
)
def test_bytes_that_are_not_utf8_in_all_formats(tmp_path: Path, format: str, content: bytes, kept: int) -> None:
    path = write(tmp_path / "x.txt", content)
    with pytest.raises(UserError, match=rf"x.txt: byte {content.index(0xE9)}: not UTF-8 \(e9"):
        read(path, format)
    assert any("caf\ufffd" in text for document in read(path, format, "replace")[0] for text in document.passages)
    documents, problems = read(path, format, "skip")
    assert len(documents) == kept
    assert len(problems.skipped) == 1


def test_a_place_in_later_streams_says_from_where_it_counts(tmp_path: Path) -> None:
    content = wiki_dump(*many_pages(99), page("Bad", "cafX")).replace(b"cafX", b"caf\xe9")
    path = write(tmp_path / "x.xml.bz2", in_streams(content, 4000))
    place = r"byte [\d,]+ of the uncompressed text in the streams from byte [\d,]+ on: not"
    with pytest.raises(UserError, match=place):
        read(path, "mediawiki", step=40_000)
