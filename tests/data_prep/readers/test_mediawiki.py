"""MediaWiki's dumps, however they are packed, and WikiExtractor's output, with tags and as JSON."""

import json
import re
from pathlib import Path

import pytest
from support.commands import assert_refusal, refusal
from support.reading import COMPRESS, detected, in_streams, many_pages, page, passages, read, wiki_dump, write

from data_prep.readers.reader import Document


@pytest.mark.parametrize("stream", [None, 1 << 30, 7000])
def test_a_dump_is_read_alike_however_it_is_packed_and_cut(tmp_path: Path, stream: int | None) -> None:
    content = wiki_dump(*many_pages(100))
    path = write(tmp_path / ("x.xml.bz2" if stream else "x.xml"), in_streams(content, stream) if stream else content)
    assert detected(path) == "mediawiki"
    for step in (1 << 30, 40_000, 7_777):
        documents, _ = read(path, "mediawiki", step=step)
        found = [(document.id, document.title, len(document.passages)) for document in documents]
        assert found == [(str(number), f"T{number}", 1) for number in range(100)]


def test_articles_only(tmp_path: Path) -> None:
    pages = [
        page("Plain", "Text &amp;amp; more &lt;ref&gt;Not this.&lt;/ref&gt;here."),
        page("Talk:Plain", "Chatter.", namespace=1),
        page("Old name", "#REDIRECT [[Plain]]", more='\n    <redirect title="Plain" />'),
        page("Older name", "#redirect [[Plain]]"),
        page("Alter Name", "See [[Plain]].", more='\n    <redirect title="Plain" />'),
        page("Alter", "#WEITERLEITUNG [[Plain]]"),
        page("Vecchio", "#rinvia[[Plain]]\n"),
        page("पुराना", "#पुनर्प्रेषित: [[Plain]]"),
        page("List", "#[[Plain]] and more\n# [[Plain]]\n#* a [[Plain]]\nText."),
        page("Mercury (disambiguation)", "'''Mercury''' may be:\n* a planet"),
        page("Mars", "'''Mars''' may be:\n* a planet\n{{disambig}}"),
        page("Merkur", "'''Merkur''' ist:\n* ein Planet\n{{Begriffsklärung}}"),
        page("Venus", "It is one.{{disambiguation needed|date=May 2020}} Yes. {{Other uses|Venus (disambiguation)}}"),
        page("Empty", ""),
        page("Word", "Word"),
        page("Bild", "[[Datei:x.jpg|mini|A [[caption]].]][[File:y.jpg]]Text with an image."),
    ]
    path = write(tmp_path / "x.xml", wiki_dump(*pages))
    expected = {
        "Plain": ["Text & more here."],
        "List": ["Text."],
        "Venus": ["It is one. Yes."],
        "Empty": [],
        "Word": ["Word"],
    }
    found = {document.title: document.passages for document in read(path, "mediawiki")[0]}
    assert found == {**expected, "Bild": ["Text with an image."]}


def test_a_page_may_have_its_history_and_name_its_namespace(tmp_path: Path) -> None:
    new = "<revision><id>3</id><text>New text.</text></revision></page>"
    named = page("A", "Text.").replace("<page>", '<page xmlns="http://www.mediawiki.org/xml/export-0.10/">')
    pages = [page("A", "Old text.").replace("</page>", new), named, page("B", "More.")]
    assert passages(write(tmp_path / "x.xml", wiki_dump(*pages)), "mediawiki") == [["New text."], ["Text."], ["More."]]


XML = "broken XML in this page: "
BROKEN = [
    ("  <page><title>B</title><ns>0</page>\n", f"{XML}mismatched tag: line 1"),
    (page("B", "&lol9;"), f"{XML}undefined entity"),
    (page("B", "a \x00 b"), f"{XML}not well-formed"),
    *((page("B", code), f"{XML}reference to invalid character number") for code in ("&#0;", "&#xD800;")),
    (page("B", "x").replace("</page>", ""), "no </page>: the file is cut short or broken"),
    (page("B", "x").replace("<page>", '<page><!DOCTYPE b [<!ENTITY l "x">]>'), f"{XML}not well"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_broken_pages(tmp_path: Path, broken: str, message: str) -> None:
    content = wiki_dump(page("A", "Good.", 1), broken, page("C", "Fine.", 3))
    path = write(tmp_path / "x.xml", content)
    said = refusal(read, path, "mediawiki")
    assert said.startswith(f"{path}: byte {content.index(b'<page', content.index(b'</page>')):,}: {message}")
    assert "--errors skip leaves the document out and lists it" in said
    documents, problems = read(path, "mediawiki", "skip")
    assert [document.title for document in documents] == ["A", "C"]
    assert problems.skipped == [said.partition("\n")[0]]


def test_a_dump_that_is_cut_short_or_whose_pages_do_not_open(tmp_path: Path) -> None:
    whole = wiki_dump(*many_pages(3))
    path = write(tmp_path / "x.xml", whole[:-200])
    assert_refusal(r"no </page>: the file is cut short or broken", read, path, "mediawiki")
    documents, problems = read(path, "mediawiki", "skip")
    assert (len(documents), len(problems.skipped)) == (2, 1)
    path = write(tmp_path / "x.xml", wiki_dump(page("A", "Good."), page("B", "Text.").replace("<page>", "<pag>")))
    assert_refusal(r"byte [\d,]+: text after </page>: b'<pag>", read, path, "mediawiki")


def test_entities_that_a_dump_defines_are_never_expanded(tmp_path: Path) -> None:
    levels = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<?xml version="1.0"?>\n<!DOCTYPE mediawiki [<!ENTITY l0 "lol">{levels}]>\n'
    for suffix in ("", ".bz2"):
        path = write(tmp_path / f"x.xml{suffix}", COMPRESS[suffix](wiki_dump(page("A", "&l9;"), head=bomb)))
        assert detected(path) == "mediawiki"
        documents, problems = read(path, "mediawiki", "skip")
        assert documents == []
        assert "broken XML in this page: undefined entity" in problems.skipped[0]


TAGGED = """<doc id="12" url="https://x.org/?curid=12" title="Tom &amp; Jerry">
Tom &amp; Jerry

Tom &amp; Jerry is a show&lt;br /&gt; of cats<br>and mice.
Where a < b and b > c, H<sub>2</sub>O stays.</li>
<br clear=all>
See <http://x.org/a> and <THE END>.<ref name="a"/> More<nowiki/>.

</doc>
<doc id="14" url="u" title="The "best" of it">
The "best" of it

One.
</doc>
<doc id="15" url="u" title="A">
Another first line.
</doc>
"""


def test_wikiextractor_with_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "wiki_00", TAGGED)
    assert detected(path) == "wikiextractor"
    shown = ["Tom & Jerry is a show of cats and mice.", "Where a < b and b > c, H2O stays."]
    assert read(path, "wikiextractor")[0] == [
        Document("12", "Tom & Jerry", [*shown, "See <http://x.org/a> and <THE END>. More."]),
        Document("14", 'The "best" of it', ["One."]),
        Document("15", "A", ["Another first line."]),
    ]


def test_wikiextractor_with_other_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = '\ufeff<doc id="1" url="u" title="A">\nA\n\nOne.\nTwo.\n</doc>\n<doc id="2" url="u" title="B">\nB\n</doc>\n'
    path = write(tmp_path / "wiki_00", text.replace("\n", "\r\n"))
    assert detected(path) == "wikiextractor"
    expected = [Document("1", "A", ["One.", "Two."]), Document("2", "B", [])]
    assert all(read(path, "wikiextractor", step=step)[0] == expected for step in (1 << 20, 7))


def test_wikiextractor_json(tmp_path: Path) -> None:
    lines = [
        {"id": "1", "revid": "2", "url": "u", "title": "A & B", "text": "A &amp; B\n\nCats &amp; dogs<br>bark.\nTwo."},
        {"id": "2", "url": "u", "title": "C", "text": "C"},
        {"id": "3", "url": "u", "title": "D", "text": ""},
    ]
    path = write(tmp_path / "wiki_00", "".join(json.dumps(line) + "\n" for line in lines))
    assert detected(path) == "jsonl"
    first = Document("1", "A & B", ["Cats & dogs bark.", "Two."])
    assert read(path, "jsonl")[0] == [first, Document("2", "C", []), Document("3", "D", [])]


UNTAGGED = [
    ('<doc id="1" title="A">\nA\n\nText.\n', "byte 0: no </doc>: the file is cut short"),
    ('half a text\n</doc>\n<doc id="1" title="A">\nA\n</doc>\n', "byte 0: text that is in no <doc>"),
    ('<doc id="1" title="A">\nA\n</doc>\nstray\n', "byte 31: text after </doc>: b'stray"),
]


@pytest.mark.parametrize(("text", "message"), UNTAGGED)
def test_broken_wikiextractor_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "wiki_00", text)
    assert_refusal(f"wiki_00: {message}", read, path, "wikiextractor")
    assert len(read(path, "wikiextractor", "skip")[1].skipped) == 1


@pytest.mark.realdata
def test_real_wikipedia(real_data: Path) -> None:
    for path in sorted((real_data / "wiki/AA").iterdir())[::4]:
        documents, _ = read(path, "wikiextractor", step=300_000)
        assert len(documents) == sum(line.startswith(b"<doc ") for line in path.read_bytes().split(b"\n"))
        text = "\n".join(passage for document in documents for passage in document.passages)
        assert not re.search("<br|</?ref|</li>", text, re.IGNORECASE)
