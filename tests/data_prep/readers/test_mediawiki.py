"""MediaWiki's dumps: articles alone, however a dump is packed, and broken pages by their places."""

from __future__ import annotations

import bz2
import re
from pathlib import Path

import pytest
from support.reading import detected, in_streams, many_pages, page, passages, read, wiki_dump, write

from data_prep.common.errors import UserError


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
        page("Venus", "It is one.{{disambiguation needed|date=May 2020}} Yes. {{Other uses|Venus (disambiguation)}}"),
        page("Empty", ""),
        page("Word", "Word"),
        page("Bild", "[[Datei:x.jpg|mini|A [[caption]].]][[File:y.jpg]]Text with an image."),
    ]
    path = write(tmp_path / "x.xml", wiki_dump(*pages))
    assert {document.title: document.passages for document in read(path, "mediawiki")[0]} == {
        "Plain": ["Text & more here."],
        "Venus": ["It is one. Yes."],
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
    path = write(tmp_path / "x.xml", wiki_dump(named, page("B", "More.")))
    assert passages(path, "mediawiki") == [["Text."], ["More."]]


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
                read(path, "mediawiki", errors)
