"""The readers: what each makes of its format, how files are cut into records, and what is said of bad input."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.common.errors import UserError
from data_prep.readers import READERS, books, cutting, demo, jsonlines, mediawiki, sentences, wikiextractor
from data_prep.readers.cutting import Errors, Options, Problems, Span
from data_prep.readers.documents import Document
from data_prep.readers.sources import find_files

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
OPENINGS = [mediawiki.OPENING, wikiextractor.OPENING, jsonlines.OPENING, sentences.OPENING]


def read(
    path: Path, format: str, errors: Errors = "fail", step: int = 1 << 20, **options: Any
) -> tuple[list[Document], Problems]:
    """All documents of a file, and what was wrong with it."""
    problems, reader = Problems(errors), READERS[format]
    spans = reader.spans(path, step)
    return [each for span in spans for each in reader.read(span, Options(problems, **options))], problems


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def passages(path: Path, format: str, **options: Any) -> list[list[str]]:
    return [document.passages for document in read(path, format, **options)[0]]


def detected(path: Path) -> str:
    return find_files([str(path)], None)[0].format


def in_streams(data: bytes, size: int) -> bytes:
    """As pbzip2 compresses: a stream for each so many bytes, wherever that cuts the text."""
    return b"".join(bz2.compress(data[at : at + size]) for at in range(0, len(data), size))


# Cutting files into records


def pieces(content: bytes, opening: re.Pattern[bytes]) -> list[tuple[int, bytes]]:
    """What records are, in the plainest way: the whole file cut at the ends of all matches."""
    if not content:
        return []
    first = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    starts = [first, *(match.end() for match in opening.finditer(content) if match.end() > first)]
    return [(start, content[start:end]) for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]


MARKS = b'\n|\n|\r\n|\n\n|\n \t\n| |\t|<doc |<doc id=|</doc>\n|<page>|<page |</page>|<pag|{"a"|word|\xef\xbb\xbf'.split(
    b"|"
)
FRAGMENTS = st.sampled_from([*MARKS, b"\n" * 9, b" " * 70 + b"\n", b"\t" * 101, b"x" * 300])
CONTENT = st.builds(b"".join, st.lists(st.one_of(FRAGMENTS, st.binary(max_size=4)), max_size=60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all the examples of a property."""
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("opening", OPENINGS, ids=lambda opening: opening.pattern.decode())
@given(content=CONTENT, block=st.sampled_from([3, 50, 300, 1 << 20]), step=st.integers(1, 2000), mark=st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_record_is_in_exactly_one_span(
    folder: Path, opening: re.Pattern[bytes], content: bytes, block: int, step: int, mark: bool
) -> None:
    path = write(folder / "plain", b"\xef\xbb\xbf" + content if mark else content)
    step = max(step, path.stat().st_size // 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK", block)
        spans = cutting.ranges(path, step)
        found = [record for span in spans for record in cutting.records(span, opening)]
    assert found == pieces(path.read_bytes(), opening)


@given(
    content=CONTENT,
    cuts=st.lists(st.integers(0, 3000), max_size=8, unique=True),
    block=st.sampled_from([3, 50, 1 << 20]),
    step=st.integers(1, 600),
    empty=st.integers(0, 3),
)
@example(content=b"<page>a", cuts=[], block=50, step=1, empty=0)
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
        found = [record for span in spans for _, record in cutting.records(span, mediawiki.OPENING)]
    if not parts[0]:  # a file does not begin with an empty stream; what is before the first page may get lost
        assert [each for each in found if each.startswith(b"<page")] == [
            each for _, each in pieces(content, mediawiki.OPENING) if each.startswith(b"<page")
        ]
    elif content:
        assert found == [record for _, record in pieces(content, mediawiki.OPENING)]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_compressed_files_have_the_same_records(tmp_path: Path, suffix: str) -> None:
    content = b"".join(b'{"text": "line %d"}\n' % number for number in range(200_000))
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](content))
    (span,) = cutting.ranges(path, 1 << 16)
    assert list(cutting.records(span, jsonlines.OPENING)) == pieces(content, jsonlines.OPENING)


def test_members_one_after_another_are_all_read(tmp_path: Path) -> None:
    for suffix in (".gz", ".bz2", ".zst"):
        compress = COMPRESS[suffix]
        path = write(tmp_path / f"x.jsonl{suffix}", compress(b'{"text": "a"}\n{"te') + compress(b'xt": "b"}\n'))
        assert passages(path, "jsonl") == [["a"], ["b"]]


class CountingOpening:
    """That of JSON lines; knows how much it has searched, and in which buffers."""

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
    (record,) = cutting.records(Span(str(path), 0, path.stat().st_size), opening)  # type: ignore[arg-type]
    assert len(record[1]) == size
    assert opening.searched < 1.2 * size + 1000 * cutting.CONTEXT
    assert len(opening.buffers) == 1  # it grows in its place


def test_spans_within_a_long_record_do_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, block = 1_000_000, 1000
    path = write(tmp_path / "x", b" " * size + b"\n{}\n")
    monkeypatch.setattr(cutting, "BLOCK", block)
    opening = CountingOpening()
    found = [record for span in cutting.ranges(path, 10_000) for record in cutting.records(span, opening)]  # type: ignore[arg-type]
    assert [len(record) for _, record in found] == [size + 1, 3]
    assert opening.searched < 4 * size


def test_blocks_of_a_bz2_bomb_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.bz2", bz2.compress(bytes(20_000_000)))
    monkeypatch.setattr(cutting, "BLOCK", 1000)
    blocks = cutting._bz2_blocks(path, Span(str(path), 0, path.stat().st_size))
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
    assert cutting._next_bz2_stream(file, Span(str(path), 1000, 2000)) is None  # type: ignore[arg-type]
    assert file.count <= cutting.BLOCK


def test_a_record_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LARGEST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(cutting, "BLOCK", 1 << 16)
    path = write(tmp_path / "x.jsonl", b'{"text": "a"}\n' + b"x" * (2 << 20))
    with pytest.raises(UserError, match=r"x.jsonl: byte 14: a record of more than 1 MB; cut it up"):
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


@pytest.mark.slow
def test_a_book_of_100_mb_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.md", "It was a dark and *stormy* night_, and [the rain fell. " * 2_000_000)
    (document,) = passages(path, "text")
    assert len(document) == 1
    assert document[0].startswith("It was a dark and stormy night_, and [the rain fell. It was")


# Damage


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("fault", ["cut", "garbage after it", "no such thing"])
def test_damaged_compressed_files(tmp_path: Path, suffix: str, fault: str) -> None:
    data = COMPRESS[suffix](b'{"text": "%s"}\n' % random.Random(1).randbytes(100_000).hex().encode())
    data = {"cut": data[:-20], "garbage after it": data + b"garbage, garbage", "no such thing": b"plain text\n" * 9}[
        fault
    ]
    path = write(tmp_path / f"x.jsonl{suffix}", data)
    for errors in ("fail", "replace", "skip"):
        with pytest.raises(UserError, match=rf"x.jsonl\{suffix}: truncated or damaged \{suffix}: "):
            read(path, "jsonl", errors)  # type: ignore[arg-type]


def wiki_dump(*pages: str, head: str = "") -> bytes:
    space = 'xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en"'
    names = '<namespace key="6" case="first-letter">Datei</namespace><namespace key="0" case="first-letter" />'
    siteinfo = f"<siteinfo><sitename>X</sitename><namespaces>{names}</namespaces></siteinfo>"
    return f"{head}<mediawiki {space}>\n  {siteinfo}\n{''.join(pages)}</mediawiki>\n".encode()


def page(title: str, text: str, number: int = 1, more: str = "", namespace: int = 0) -> str:
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{namespace}</ns>\n    <id>{number}</id>{more}\n    <revision>\n"
        f"      <id>9{number}</id>\n      <contributor><username>N</username><id>7</id></contributor>\n      "
        f'<text bytes="{len(text)}" sha1="x" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


def many_pages(count: int = 300) -> list[str]:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefghij", k=7)) for _ in range(40_000)]
    return [page(f"T{n}", f"'''T{n}''' is {' '.join(words[n * 100 : n * 100 + 100])}.", n) for n in range(count)]


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
    write(path, b"".join(streams[:31])[:-100])
    with pytest.raises(
        UserError, match=rf"x.xml.bz2: truncated or damaged .bz2: the stream at byte {at:,}: it does not"
    ):
        list(cutting.records(span, mediawiki.OPENING))
    write(path, b"".join(streams[:30]) + b"garbage" + streams[31])
    with pytest.raises(
        UserError, match=rf"x.xml.bz2: truncated or damaged .bz2: the stream at byte {at:,}: Invalid data"
    ):
        list(cutting.records(span, mediawiki.OPENING))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
def test_bytes_that_are_not_utf8(tmp_path: Path, suffix: str) -> None:
    lines = b'{"text": "good", "id": "a"}\n{"text": "caf\xe9", "id": "b"}\n{"text": "fine", "id": "c"}\n'
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](lines))
    place = f"{path}: byte {lines.index(0xE9)}" + (" of the uncompressed text" if suffix else "")
    with pytest.raises(UserError) as caught:
        read(path, "jsonl")
    cures = "--errors replace reads on with U+FFFD; --errors skip leaves the document out and lists it"
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
    assert any("caf\ufffd" in text for each in read(path, format, "replace")[0] for text in each.passages)
    documents, problems = read(path, format, "skip")
    assert len(documents) == kept
    assert len(problems.skipped) == 1


def test_a_place_in_later_streams_says_from_where_it_counts(tmp_path: Path) -> None:
    content = wiki_dump(*many_pages(99), page("Bad", "cafX")).replace(b"cafX", b"caf\xe9")
    path = write(tmp_path / "x.xml.bz2", in_streams(content, 4000))
    with pytest.raises(
        UserError, match=r"byte [\d,]+ of the uncompressed text in the streams from byte [\d,]+ on: not"
    ):
        read(path, "mediawiki", step=40_000)


# MediaWiki dumps


@pytest.mark.parametrize("stream", [None, 1 << 30, 7000])
def test_a_dump_is_read_alike_however_it_is_packed_and_cut(tmp_path: Path, stream: int | None) -> None:
    content = wiki_dump(*many_pages())
    path = write(tmp_path / ("x.xml.bz2" if stream else "x.xml"), in_streams(content, stream) if stream else content)
    assert detected(path) == "mediawiki"
    for step in (1 << 30, 100_000, 7_777):
        documents, _ = read(path, "mediawiki", step=step)
        assert [document.id for document in documents] == [str(n) for n in range(300)]
        assert [document.title for document in documents] == [f"T{n}" for n in range(300)]
        assert all(len(document.passages) == 1 for document in documents)


def test_articles_only(tmp_path: Path) -> None:
    pages = [
        page("Plain", "Text &amp;amp; more &lt;ref&gt;Not this.&lt;/ref&gt;here."),
        page("Talk:Plain", "Chatter.", namespace=1),
        page("Old name", "#REDIRECT [[Plain]]", more='\n    <redirect title="Plain" />'),
        page("Older name", "#redirect [[Plain]]"),
        page("Mercury (disambiguation)", "'''Mercury''' may be:\n* a planet"),
        page("Mars", "'''Mars''' may be:\n* a planet\n{{disambig}}"),
        page("Merkur", "'''Merkur''' ist:\n* ein Planet\n{{Begriffsklärung}}"),
        page(
            "Venus",
            "It is a planet.{{disambiguation needed|date=May 2020}} Really. {{Other uses|Venus (disambiguation)}}",
        ),
        page("Empty", ""),
        page("Word", "Word"),
        page("Bild", "[[Datei:x.jpg|mini|A [[caption]].]][[File:y.jpg]]Text with an image."),
    ]
    path = write(tmp_path / "x.xml", wiki_dump(*pages))
    assert {document.title: document.passages for document in read(path, "mediawiki")[0]} == {
        "Plain": ["Text & more here."],
        "Venus": ["It is a planet. Really."],
        "Empty": [],
        "Word": ["Word"],
        "Bild": ["Text with an image."],
    }


def test_a_page_with_its_history_has_its_newest_text(tmp_path: Path) -> None:
    new = "<revision><id>3</id><text>New text.</text></revision></page>"
    path = write(tmp_path / "x.xml", wiki_dump(page("A", "Old text.").replace("</page>", new)))
    assert passages(path, "mediawiki") == [["New text."]]


def test_pages_may_name_their_namespace(tmp_path: Path) -> None:
    named = page("A", "Text.").replace("<page>", '<page xmlns="http://www.mediawiki.org/xml/export-0.10/">')
    assert passages(write(tmp_path / "x.xml", wiki_dump(named, page("B", "More."))), "mediawiki") == [
        ["Text."],
        ["More."],
    ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("  <page><title>B</title><ns>0</page>\n", "broken XML in this page: mismatched tag: line 1"),
        (page("B", "&lol9;"), "broken XML in this page: undefined entity"),
        (page("B", "a \x00 b"), "broken XML in this page: not well-formed"),
        (page("B", "&#0;"), "broken XML in this page: reference to invalid character number"),
        (page("B", "&#xD800;"), "broken XML in this page: reference to invalid character number"),
        (page("B", "x").replace("</page>", ""), "a <page> without its </page>: the dump is cut short or broken"),
        (page("B", "x").replace("<page>", '<page><!DOCTYPE b [<!ENTITY l "x">]>'), "broken XML in this page: not well"),
    ],
)
def test_broken_pages(tmp_path: Path, broken: str, message: str) -> None:
    content = wiki_dump(page("A", "Good.", 1), broken, page("C", "Fine.", 3))
    path = write(tmp_path / "x.xml", content)
    place = f"{path}: byte {content.index(b'<page', content.index(b'</page>')):,}: "
    with pytest.raises(UserError, match=re.escape(place + message)) as caught:
        read(path, "mediawiki")
    assert "--errors skip leaves the document out and lists it" in str(caught.value)
    documents, problems = read(path, "mediawiki", "skip")
    assert [document.title for document in documents] == ["A", "C"]
    assert len(problems.skipped) == 1
    assert problems.skipped[0].startswith(place + message)


def test_a_page_whose_opening_is_broken_is_not_lost_in_silence(tmp_path: Path) -> None:
    path = write(tmp_path / "x.xml", wiki_dump(page("A", "Good."), page("B", "Text.").replace("<page>", "<pag>")))
    with pytest.raises(UserError, match=r"byte [\d,]+: broken XML after this page: b'<pag>"):
        read(path, "mediawiki")


def test_a_dump_that_is_cut_short(tmp_path: Path) -> None:
    whole = wiki_dump(*many_pages(3))
    path = write(tmp_path / "x.xml", whole[:-200])
    with pytest.raises(UserError, match=r"a <page> without its </page>: the dump is cut short or broken"):
        read(path, "mediawiki")
    documents, problems = read(path, "mediawiki", "skip")
    assert (len(documents), len(problems.skipped)) == (2, 1)


def test_entity_bombs_are_refused(tmp_path: Path) -> None:
    levels = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<?xml version="1.0"?>\n<!DOCTYPE mediawiki [<!ENTITY l0 "lol">{levels}]>\n'
    for name in ("x.xml", "x.xml.bz2"):
        content = wiki_dump(page("A", "&l9;"), head=bomb)
        path = write(tmp_path / name, bz2.compress(content) if name.endswith("bz2") else content)
        assert detected(path) == "mediawiki"
        for errors in ("fail", "skip"):
            with pytest.raises(UserError, match=r"defines a document type or entities; .* refused as hostile"):
                read(path, "mediawiki", errors)  # type: ignore[arg-type]


# WikiExtractor


def test_wikiextractor_with_tags(tmp_path: Path) -> None:
    path = write(
        tmp_path / "wiki_00",
        """<doc id="12" url="https://x.org/?curid=12" title="Tom &amp; Jerry">
Tom &amp; Jerry

Tom &amp; Jerry is a show&lt;br /&gt; of cats<br>and mice.
Where a < b and b > c, H<sub>2</sub>O stays.</li>
<br clear=all>
See <http://x.org/a> and <THE END>.<ref name="a"/> More<nowiki/>.

</doc>
<doc id="13" url="u" title="Empty">
Empty

</doc>
<doc id="14" url="u" title="The "best" of it">
The "best" of it

One.
</doc>
<doc id="15" url="u" title="A">
Another first line.
</doc>
""",
    )
    assert detected(path) == "wikiextractor"
    documents, _ = read(path, "wikiextractor")
    assert [(each.id, each.title) for each in documents] == [
        ("12", "Tom & Jerry"),
        ("13", "Empty"),
        ("14", 'The "best" of it'),
        ("15", "A"),
    ]
    assert [document.passages for document in documents] == [
        [
            "Tom & Jerry is a show of cats and mice.",
            "Where a < b and b > c, H2O stays.",
            "See <http://x.org/a> and <THE END>. More.",
        ],
        [],
        ["One."],
        ["Another first line."],
    ]


def test_wikiextractor_with_other_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff<doc id="1" url="u" title="A">\nA\n\nOne.\nTwo.\n</doc>\n<doc id="2" url="u" title="B">\nB\n</doc>\n'
    text = text.replace("\n", "\r\n")
    path = write(tmp_path / "wiki_00", text)
    assert detected(path) == "wikiextractor"
    for step in (1 << 20, 7):
        assert read(path, "wikiextractor", step=step)[0] == [
            Document("1", "A", ["One.", "Two."]),
            Document("2", "B", []),
        ]


def test_wikiextractor_json(tmp_path: Path) -> None:
    lines = [
        {"id": "1", "revid": "2", "url": "u", "title": "A & B", "text": "A &amp; B\n\nCats &amp; dogs<br>bark.\nTwo."},
        {"id": "2", "url": "u", "title": "C", "text": "C"},
        {"id": "3", "url": "u", "title": "D", "text": ""},
    ]
    path = write(tmp_path / "wiki_00", "".join(json.dumps(line) + "\n" for line in lines))
    assert detected(path) == "jsonl"
    assert read(path, "jsonl")[0] == [
        Document("1", "A & B", ["Cats & dogs bark.", "Two."]),
        Document("2", "C", []),
        Document("3", "D", []),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<doc id="1" title="A">\nA\n\nText.\n', "byte 0: a <doc> without its </doc>: the file is cut short"),
        ('half a text\n</doc>\n<doc id="1" title="A">\nA\n</doc>\n', "byte 0: text that is in no <doc>"),
        (
            '<doc id="1" title="A">\nA\n</doc>\nstray words\n',
            r"byte 25: text after </doc> that is in no <doc>: b'stray",
        ),
    ],
)
def test_broken_wikiextractor_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "wiki_00", text)
    with pytest.raises(UserError, match=f"wiki_00: {message}"):
        read(path, "wikiextractor")
    assert len(read(path, "wikiextractor", "skip")[1].skipped) == 1


@pytest.mark.realdata
def test_real_wikipedia(real_data: Path) -> None:
    for path in sorted((real_data / "wiki/AA").iterdir()):
        documents, _ = read(path, "wikiextractor", step=300_000)
        assert len(documents) == sum(line.startswith(b"<doc ") for line in path.read_bytes().split(b"\n"))
        assert not any(
            re.search("<br|</?ref|</li>", text, re.IGNORECASE) for each in documents for text in each.passages
        )


# Books


def book(text: str, name: str = "book.txt") -> list[str]:
    return books.passages(text, name.endswith(".md"))


def test_a_book_is_one_document_with_its_chapters_in_order(tmp_path: Path) -> None:
    (tmp_path / "Some Author").mkdir()
    text = "\n\n".join(f"CHAPTER {n}\n\nFirst line of {n}\nand its second.\n\nMore of {n}." for n in range(1, 9))
    path = write(tmp_path / "Some Author" / "Its Title.txt", text)
    assert detected(path) == "text"
    (document,) = read(path, "text", step=10)[0]
    assert (document.id, document.title) == ("Some Author/Its Title.txt", "Its Title")
    assert document.passages == [
        line for n in range(1, 9) for line in (f"CHAPTER {n}", f"First line of {n} and its second.", f"More of {n}.")
    ]
    packed = write(tmp_path / "Some Author" / "Its Title.txt.gz", gzip.compress(text.encode()))
    assert read(packed, "text")[0][0].title == "Its Title"


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_line_ends_and_byte_order_mark(tmp_path: Path, end: str) -> None:
    text = "\ufeffOne line\nand another.\n \t\nNew paragraph.\n\n\n\nLast.\n".replace("\n", end)
    assert passages(write(tmp_path / "x.txt", text), "text") == [["One line and another.", "New paragraph.", "Last."]]


GUTENBERG_HEAD = (
    "The Project Gutenberg EBook of X, by Y\n\nThis eBook is for the use of anyone anywhere.\n\nTitle: X\n\n"
)
LICENCE = "\n\nUpdated editions will replace the previous one.\n\nSection 1. General Terms of Use\n"


@pytest.mark.parametrize(
    "start",
    [
        "*** START OF THE PROJECT GUTENBERG EBOOK X ***",
        "*** START OF THIS PROJECT GUTENBERG EBOOK X ***",
        "***START OF THE PROJECT GUTENBERG EBOOK X***",
        "*** START OF THE PROJECT GUTENBERG EBOOK A VERY LONG TITLE\nOF TWO LINES ***",
        "*** START OF THE PROJECT GUTENBERG EBOOK WITHOUT STARS",
        "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nProduced by Some One and Another\nOne at www.x.org",
        "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n\n\n\nE-text prepared by Some One",
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*",
    ],
)
@pytest.mark.parametrize(
    "end",
    [
        "*** END OF THE PROJECT GUTENBERG EBOOK X ***",
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***",
        "***END OF THE PROJECT GUTENBERG EBOOK X***",
        "End of Project Gutenberg's X, by Y",
        "End of the Project Gutenberg EBook of X, by Y\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***",
        "End of The Project Gutenberg Etext of X",
    ],
)
def test_gutenberg_header_and_licence(start: str, end: str) -> None:
    text = f"{GUTENBERG_HEAD}{start}\n\n\nIt was a dark\nnight.\n\nThe _end_ came.\n\n\n{end}{LICENCE}"
    assert book(text) == ["It was a dark night.", "The end came."]
    assert book(text.replace("\n", "\r\n")) == ["It was a dark night.", "The end came."]


def test_gutenberg_marks_may_be_missing() -> None:
    assert book("Text.\n\nEnd of Project Gutenberg's X\n\nLicence.") == ["Text."]
    assert book("Header.\n\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nText.\n\nMore.") == ["Text.", "More."]
    small_print = "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*END*"
    assert book(f"Text.\n\nEnd of Project Gutenberg's X\n\nLicence.\n\n{small_print}\n") == ["Text."]
    assert book("He read of Project Gutenberg, and *** START OF IT.") == [
        "He read of Project Gutenberg, and *** START OF IT."
    ]


def test_markdown() -> None:
    text = """---
title: A Book
author: Somebody
---
# A Book #

A *Subtitle* of Sorts
=====================

## Chapter 1
It was a **dark**, _very **stormy**_ night: ***so*** dark. It was _aw_fully cold; 2 * 3 * 4 = 24, snake_case_name.
Second line of it, with [a link](http://x.org/a_(b) "A title"), <b>HTML</b> &amp; an ![image](y.png).

![Only an image](z.png)
-------

* * *

> A quotation
> of two lines.

- first item
- second item,
  of two lines
* third

1. one
2. two

In the year
1999. It was so.

| a | b |
|---|---|
| 1 | 2 |

```python
print("no text")
```

Another Heading
---

Dated 1875\\. The \\*end\\*.
[1]: http://x.org/where
***
#
"""
    assert book(text, "book.md") == [
        "It was a dark, very stormy night: so dark. It was awfully cold; 2 * 3 * 4 = 24, snake_case_name. "
        "Second line of it, with a link, HTML & an .",
        "A quotation of two lines.",
        "first item",
        "second item, of two lines",
        "third",
        "one",
        "two",
        "In the year 1999. It was so.",
        "Dated 1875. The *end*.",
    ]


def test_what_only_looks_like_markdown_stays() -> None:
    for text in (
        "[Aside.] He goes. [Exit] [Pause]",
        "A fence that is not closed:\n```\nand the rest.",
        "It is #1, and C# too.",
        "Where ye shall never win.'\nAnd again.\n---",
        "Five _ and * alone.",
    ):
        assert book(text, "book.md") == [" ".join(text.removesuffix("\n---").split("\n"))]


@given(st.text(alphabet="a *_[]()!#-=`~>|\\\n1.&;<", max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_markdown_gives_lines_with_their_words(text: str) -> None:
    for each in book(text, "book.md") + book(text):
        assert each == each.strip()
        assert "\n" not in each
        assert each


@pytest.mark.parametrize(
    "unit", ["*a ", "_a ", "[", "![", "[](", "[](a ", "](", "**", "```\n", "~~~\n", "> ", "\n- ", "|", "- "]
)
def test_hostile_markdown_takes_no_longer_for_being_long(unit: str) -> None:
    book(unit * (600_000 // len(unit)), "book.md")  # minutes, were it quadratic


@pytest.mark.realdata
def test_real_books(real_data: Path) -> None:
    paths = sorted((real_data / "books").glob("*/*.md"))[::4]
    assert len(paths) > 20
    for path in paths:
        assert detected(path) == "text"
        (document,) = read(path, "text", step=1000)[0]
        assert len(document.passages) > 5
        assert not [text for text in document.passages if text.startswith("#") or not text.strip("-*_= ")]


def test_empty_and_one_word_books(tmp_path: Path) -> None:
    assert passages(write(tmp_path / "a.txt", " \n\n"), "text") == [[]]
    assert passages(write(tmp_path / "b.txt", "Word"), "text") == [["Word"]]
    assert passages(write(tmp_path / "c.txt", "A\x00B \x00"), "text") == [["A\x00B \x00"]]


def test_a_book_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "LARGEST_DOCUMENT", 1 << 20)
    with pytest.raises(UserError, match=r"x.txt: one document of more than 1 MB; cut it up, or .*--format sentences"):
        read(write(tmp_path / "x.txt", "word " * 300_000), "text")


# One sentence a line

SAMPLE = """This text has characters such as 力加勝北区 in it.
Each line of it is one sentence, and an empty line parts the documents.
"Is it so?" he asked.

The rain had stopped before the morning came over the hills at Mr. Grey's farm.
Nobody had seen it stop…
It was 5 p.m. when somebody did (or so they said).

An open letter
The third document begins here!
“It ends here.”
"""


def test_the_original_format(tmp_path: Path) -> None:
    path = write(tmp_path / "sample.txt", SAMPLE)
    assert detected(path) == "sentences"
    expected = [part.strip().split("\n") for part in SAMPLE.split("\n\n")]
    for step in (1 << 20, 10):
        assert passages(path, "sentences", step=step) == expected
    assert READERS["sentences"].has_sentences
    crlf = write(
        tmp_path / "crlf.txt", "\ufeff\r\n" + SAMPLE.replace("\n", "\r\n").replace("\r\n\r\n", "\r\n  \r\n\r\n")
    )
    assert detected(crlf) == "sentences"
    assert [each for each in passages(crlf, "sentences", step=10) if each] == expected


def test_line_separators_are_no_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "One\u2028two\x85three\x0cfour.\nFive.\n\n  Six.\n")
    assert passages(path, "sentences") == [["One\u2028two\x85three\x0cfour.", "Five."], ["Six."]]


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("long.txt", "One sentence is here.\nHere is another one.\n" * 900, "sentences"),  # no end of it in sight
        (
            "lower.txt",
            "he was , as usual , there .\n`` was he ? ''\nhe was not there .\nthey knew it .\n\n" * 20,
            "sentences",
        ),
        ("chinese.txt", "今天天气很好。\n我们去公园吧！\n\n他来了吗？\n没有来。\n" * 20, "sentences"),
        ("bare", SAMPLE * 3, "sentences"),
        (
            "wrapped.txt",
            "It was the best of times for\nthose who had them. It was\nthe worst for others, who\nhad none.\n\n" * 9,
            "text",
        ),
        ("paragraphs.txt", "It was one. It was two. It was more.\n\nHe came. He went. He came again.\n\n" * 9, "text"),
        ("dialogue.txt", '"Is it?"\n\n"It is."\n\nHe went away.\n\nShe stayed there.\n\n' * 9, "text"),
        ("blocks.txt", "He came. He went.\nHe saw it. It saw him.\nThen it went. So did he.\n\n" * 9, "text"),
        (
            "verse.txt",
            "The sun has set upon the sea\nAnd all the birds are still,\nThe night\nfalls on the hill.\n\n" * 9,
            "text",
        ),
        ("few.txt", "One.\nTwo.\n", "text"),
        ("notes.md", "One sentence is here.\nHere is another one.\n\n" * 9, "text"),
        ("LICENSE", "Anyone may read this\nand do as they like.\n", "text"),
    ],
)
def test_sentences_or_a_book(tmp_path: Path, name: str, text: str, format: str) -> None:
    assert detected(write(tmp_path / name, text)) == format
    assert detected(write(tmp_path / f"{name}.gz", gzip.compress(text.encode()))) == format


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01\x02\x03", b"\xff\xfea\x00b\x00", b"caf\xe9, latin-1\n" * 9])
def test_a_file_without_a_suffix_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="the format of 1 of 1 files is not known"):
        detected(write(tmp_path / "file", content))


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.txt", "About <mediawiki> and <page> tags.\n", "text"),
        ("wiki_00", '<doc id="1" url="u" title="XML">\nXML\n\nA <page> in <mediawiki>.\n</doc>\n', "wikiextractor"),
        ("a.json", '{"text": "<page> of <mediawiki>"}\n', "jsonl"),
        ("a.jsonl", '\ufeff\n{ "text" : "x"}\n', "jsonl"),
        ("a.xml", "<?xml version='1.0'?>\n<!-- c -->\n<mediawiki>\n", "mediawiki"),
        ("a", "\n <page>\n<title>A</title></page>", "mediawiki"),
    ],
)
def test_the_content_tells_the_format(tmp_path: Path, name: str, content: str, format: str) -> None:
    assert detected(write(tmp_path / name, content)) == format


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,text\n1,word\n"),
        ("a.json", '[{"text": "x"}]'),
        ("a.html", "<html>text</html>"),
        ("a.py", "x = 1\n"),
    ],
)
def test_other_formats_are_not_guessed_at(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(UserError, match=rf"the format of 1 of 1 files is not known, such as .*{name}"):
        detected(write(tmp_path / name, content))


# JSON lines


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        '{"text": "One.\\n\\n Two. \\r\\nThree.", "id": 7, "title": "T"}',
        "",
        '{"text": null}',
        '{"text": "", "_id": "x"}',
        '  {"text": "word", "docid": 1.5, "title": null}  ',
        '{"text": "a\\u0000b \\ud83d\\ude00", "id": null}',
        '{"text": "no end of line"}',
    ]
    text = "\n".join(lines)
    for name, data in (("x.jsonl", text), ("crlf.jsonl", text.replace("\n", "\r\n")), ("mark.jsonl", "\ufeff" + text)):
        path = write(tmp_path / name, data)
        for step in (1 << 20, 5):
            documents, _ = read(path, "jsonl", step=step)
            assert [each.passages for each in documents] == [
                ["One.", "Two.", "Three."],
                [],
                [],
                ["word"],
                ["a\x00b 😀"],
                ["no end of line"],
            ]
            assert [each.id for each in documents][0::2] == ["7", "x", documents[4].id]
            assert documents[3].id == "1.5"
            assert documents[1].id == f"{name}:{path.read_bytes().index(lines[2].encode())}"
            assert [each.title for each in documents] == ["T", "", "", "", "", ""]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_json_lines_in_another_field_and_packed(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b'{"content": "One."}\n{"content": "Two."}\n'))
    assert detected(path) == "jsonl"
    assert passages(path, "jsonl", text_field="content") == [["One."], ["Two."]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', "no field 'text'; there is: body, id\n--text-field names the field; "),
        ("{}", "no field 'text'; there is: none\n"),
        ('["x"]', "a JSON list; each line must be an object with a field 'text'\n"),
        ("3", "a JSON int; each line must be an object"),
        ('{"text": 5}', "the field 'text' is a int, not a text\n"),
        ('{"text": ["x"]}', "the field 'text' is a list, not a text\n"),
        ('{"text": "x"', "not a JSON object on one line: Expecting ',' delimiter"),
        ("{", "not a JSON object on one line: "),
        ("[" * 100_000, "not a JSON object on one line: "),
        ('{"text": "x", "id": ' + "9" * 5000 + "}", "not a JSON object on one line: "),
        (
            '{"text": "half \\ud800 of it"}',
            "half a surrogate pair (U+D800)\n--errors replace writes '?'; --errors skip",
        ),
        ('{"text": "x", "title": "\\udc00"}', "half a surrogate pair (U+DC00)\n"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "x.jsonl", f'{{"text": "good"}}\n{line}\n{{"text": "fine"}}\n')
    with pytest.raises(UserError) as caught:
        read(path, "jsonl")
    assert str(caught.value).startswith(f"{path}: byte 17: {message}")
    assert str(caught.value).endswith("--errors skip leaves the document out and lists it")
    documents, problems = read(path, "jsonl", "skip")
    assert [each.passages for each in documents] == [["good"], ["fine"]]
    assert len(problems.skipped) == 1
    assert problems.skipped[0].startswith(f"{path}: byte 17: {message.partition(chr(10))[0]}")


def test_lone_surrogates_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "half \\ud800 of it", "title": "\\udc00", "id": "\\ud801"}\n')
    (document,), problems = read(path, "jsonl", "replace")
    assert document == Document("?", "?", ["half ? of it"])
    assert problems.num_replaced == 2


# Parquet


def parquet(path: Path, rows: int = 100, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_parquet_as_wikipedia_is_published(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["A\n\nFirst. Second.\nThird &amp; last.", None, "", "Wörter"]
    text = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts).cast(kind)
    ids, titles, urls = ["1", "2", "3", None], ["A", "B", None, "D"], ["u"] * 4
    path = parquet(tmp_path / "train-00000-of-00041.parquet", id=ids, url=urls, title=titles, text=text, rows=3)
    assert detected(path) == "parquet"
    assert len(READERS["parquet"].spans(path, 1)) == 2
    assert read(path, "parquet")[0] == [
        Document("1", "A", ["First. Second.", "Third & last."]),
        Document("2", "B", []),
        Document("3", "", []),
        Document(f"{path.name}:1:0", "D", ["Wörter"]),
    ]


def test_parquet_as_bookcorpus_is_published(tmp_path: Path) -> None:
    rows = [f"he said number {n} , and went away ." for n in range(2500)]
    path = parquet(tmp_path / "x.parquet", text=rows, rows=1500)
    documents, _ = read(path, "parquet")
    assert [len(document.passages) for document in documents] == [1000, 500, 1000]
    assert [line for document in documents for line in document.passages] == rows
    assert [document.id for document in documents] == [f"x.parquet:{place}" for place in ("0:0", "0:1000", "1:0")]


def test_parquet_with_texts_alone(tmp_path: Path) -> None:
    texts = [f"Text {n} has two sentences. They are short." for n in range(5)] + ["One line.\nAnother."] * 5
    assert len(read(parquet(tmp_path / "x.parquet", text=texts), "parquet")[0]) == 10


def test_parquet_with_ids_and_titles_of_any_type(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", id=[1, 2], title=[1.5, None], text=["One.\nTwo.", "Three."])
    assert read(path, "parquet")[0] == [Document("1", "1.5", ["One.", "Two."]), Document("2", "", ["Three."])]
    path = parquet(tmp_path / "y.parquet", id=["a"], text=["x"])
    assert read(path, "parquet", text_field="id")[0] == [Document("a", "", ["a"])]


def test_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.array([b"good.", b"caf\xe9", b"fine."]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    path = parquet(tmp_path / "x.parquet", text=text, id=["a", "b", "c"])
    with pytest.raises(UserError, match=r"x.parquet: row group 0, row 1: byte 3: not UTF-8 \(e9\)\n--errors replace"):
        read(path, "parquet")
    assert passages(path, "parquet", errors="replace") == [["good."], ["caf\ufffd"], ["fine."]]
    documents, problems = read(path, "parquet", "skip")
    assert [document.id for document in documents] == ["a", "c"]
    assert problems.skipped == [f"{path}: row group 0, row 1: byte 3: not UTF-8 (e9)"]


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", body=["x"], id=[1], tags=[["a"]])
    with pytest.raises(
        UserError, match=r"x.parquet: no column 'text'; there is: body, id, tags. Name it with --text-f"
    ):
        read(path, "parquet")
    with pytest.raises(UserError, match=r"x.parquet: the column 'id' is int64, not text. Name it with --text-field"):
        read(path, "parquet", text_field="id")
    with pytest.raises(UserError, match=r"the column 'tags' is list<.*>, not text"):
        read(path, "parquet", text_field="tags")


def test_damaged_parquet(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "x.parquet", text=[f"text {n} " * 50 for n in range(999)], id=range(999)).read_bytes()
    for content in (whole[: len(whole) // 2], whole[:7], b"PAR1 and no more"):
        path = write(tmp_path / "cut.parquet", content)
        assert detected(path) == "parquet"
        with pytest.raises(UserError, match=r"cut.parquet: not a whole Parquet file: "):
            read(path, "parquet")
    path = write(tmp_path / "bad.parquet", whole[:4] + bytes(3000) + whole[3004:])
    with pytest.raises(UserError, match=r"bad.parquet: row group 0: damaged: "):
        read(path, "parquet")
    with pytest.raises(UserError, match=r"text.txt: not a whole Parquet file: "):
        read(write(tmp_path / "text.txt", "No Parquet."), "parquet")


def test_parquet_without_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", text=pa.array([], pa.string()))
    assert read(path, "parquet")[0] == []


# The demo


def test_demo_reads_documentation_strings(tmp_path: Path) -> None:
    text = (
        "This module does a number of things that are told at length here.\n\n    >>> code\n\n"
        + "It does them well. " * 12
    )
    path = write(
        tmp_path / "module.py", f'"""{text}"""\nx = 1\ndef f():\n    """Does the one thing that it is for."""\n'
    )
    (document,) = read(path, "demo")[0]
    assert document.title == "module"
    assert document.passages == [
        "This module does a number of things that are told at length here.",
        ("It does them well. " * 12).strip(),
        "Does the one thing that it is for.",
    ]
    assert read(write(tmp_path / "short.py", '"""Too short."""'), "demo")[0] == []


def test_demo_is_on_every_machine() -> None:
    files = demo.files()
    assert len(files) > 100
    assert files == sorted(set(files))
    assert not any("test" in path.parts for path in files)


# What all have in common


@pytest.mark.parametrize("format", [name for name in READERS if name != "demo"])
@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_a_file_that_is_not_there(tmp_path: Path, format: str, suffix: str) -> None:
    with pytest.raises(UserError, match=rf"none{suffix}: (cannot be read|not a whole Parquet file): "):
        list(READERS[format].read(Span(str(tmp_path / f"none{suffix}"), 0, 9), Options(Problems("fail"))))
