"""Text of MediaWiki dumps has hardly a hole where something of the page is not in it.

Holes are found by rules that know nothing of the readers: what no writer leaves, such as `( )`, ` ,`, `of the .`. A few
are the page's own. Of the templates in the middle of sentences those are lost without which a paragraph reads the same.
"""

from __future__ import annotations

import bz2
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.readers import READERS
from data_prep.readers.reader import Options, Problems
from data_prep.readers.wikitext import Wikitext, is_disambiguation

END = r"(?=[,.;!?)](?!\w)|$)"
HOLES = {
    "empty brackets or quotes": r"\(\s*\)|\[\s*\]|“\s*”|«\s*»|(?<!\w)\"\"(?!\w)",
    "brackets that begin or end with a comma": r"[(\[]\s*[,;]|[,;]\s*[)\]]",
    "a space before a comma or full stop": r"\w [,;](?=\s)|\w \.(?=\s|$)",
    "two commas": r",\s*,|;\s*[,;]|,\s*[.;](?!\.\.|\s*\.\s*\.)",
    "marks of wikitext": r"''|\[\[|\]\]|\{\{|\}\}|\{\||<(?:ref|span|math|div|br|small)\b|\|\s*\w+\s*=",
    "an article without a noun": rf"(?<![\[/⟨(.*-])\b(?:is|was|of|in|to|and|by|with|as|for|from) (?:an?|the) ?{END}",
    "a preposition without a noun": rf"\b(?:of|from|between|than|about|and) ?{END}(?!, | ?\.\.\.)",
    "a preposition before a comma": r"\b(?:of|from|At|between|about),(?! (?:but|or|and|for|in|if|as|\w+ing)\b)",
    "a word twice": r"\b(of|to|in|at|and|from|about) \1\b",
    "a unit without a number": r"\b(?:about|of|some|around|nearly|over) (?:km|m|mi|ft|kg|lb|°C|°F)\b",
    "a currency without a number": r"[$£€] (?=[a-z(])|\(\$ ",
    "a quote without a partner": r"(?:^|\s)'(?=[\s,.;:)])",
}
INLINE = re.compile(r"(?<=[\w,;:(\"'”] )\{\{([^{}|\n]+)((?:\|[^{}\n]*)?)\}\}(?=[ ,.;:)\"'])")
PROSE = re.compile(r"(?:'''|''|\[\[|\"|“)?[^\W\d_]")
SILENT = re.compile(
    r"(?:cite|sfn|efn|refn|ref\b|rp|citation|fact|cn|note|clarif|who|when|where|which|vague|dubious|page needed|"
    r"by whom|better|failed|verif|unreliable|dead|relevance|weasel|anchor|flagicon|coord|inflation-fn|clear|webarchive|"
    r"wayback|disambiguation|full|quantify|specify|according|#tag|cref|r\||sup\b)",
    re.IGNORECASE,
)
"""Templates that a reader of the page sees as the number of a note, a flag or nothing."""

WHOLE = [
    "In 1990, he left (he was 5). It is 5, or so, of the 6; \"no\" and 'yes', at $5 ... there.",
    "The house that he came from, but not the one, is about 5 km away, e.g. 5. It's the 'word'.",
]
BROKEN = ["A ( ) b.", "A (, b).", "A , b.", "A, , b.", "A {{b}}.", "It is of the.", "An area of, all", "A $ in b."]
BROKEN += ["A ' b."]


def articles(path: Path) -> Iterator[str]:
    """The wikitext of the articles of a dump."""
    content = bz2.decompress(path.read_bytes()) if path.suffix == ".bz2" else path.read_bytes()
    for found in re.findall(rb"<page>.*?</page>", content, re.DOTALL):
        page = ElementTree.fromstring(found)
        title, text = page.findtext("title", ""), page.findtext("revision/text") or ""
        if page.findtext("ns", "0") == "0" and page.find("redirect") is None and not is_disambiguation(title, text):
            yield text


def count_holes(passages: list[str]) -> int:
    """How many passages have a hole."""
    return sum(any(re.search(rule, passage) for rule in HOLES.values()) for passage in passages)


def probes(texts: list[str]) -> list[tuple[str, str]]:
    """Paragraphs with a template in the middle of a sentence that shows something, each beside itself without it."""
    found = []
    for text in texts:
        for line in re.sub(r"<ref[^<>]*/>|<ref[^<>]*>.*?</ref>|<!--.*?-->", "", text, flags=re.DOTALL).split("\n"):
            if PROSE.match(line) and line.count("{{") == line.count("}}"):
                shown = [match for match in INLINE.finditer(line) if not SILENT.match(match[1].strip())]
                found += [(line, line[: match.start()] + line[match.end() :]) for match in shown]
    return found


def count_lost(texts: list[str]) -> int:
    """How many of the templates that are probed come out as nothing."""
    wiki = Wikitext()

    def words(text: str) -> list[str]:
        return re.findall(r"\w+", " ".join(wiki.passages(text)))

    return sum(words(with_it) == words(without) for with_it, without in probes(texts))


def test_sentences_with_a_hole_are_found() -> None:
    assert count_holes(WHOLE) == 0
    assert [text for text in BROKEN if count_holes([text]) != 1] == []


def test_only_what_shows_something_in_a_sentence_is_probed() -> None:
    text = "A {{b|c}} d {{citation needed}}, {{e}}.<ref>f {{g}} h</ref>\n* i {{j}} k\n{{l}} m"
    assert probes([text]) == [
        ("A {{b|c}} d {{citation needed}}, {{e}}.", "A  d {{citation needed}}, {{e}}."),
        ("A {{b|c}} d {{citation needed}}, {{e}}.", "A {{b|c}} d {{citation needed}}, ."),
    ]


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("dump", "most_holes", "most_lost"), [("enwiki-100-pages.xml.bz2", 6, 1), ("viwiki-test.xml", 0, 0)]
)
def test_dumps_have_hardly_a_hole(dump: str, most_holes: int, most_lost: int, real_data: Path) -> None:
    path, reader = real_data / "wikidump" / dump, READERS["mediawiki"]
    pages = [page for span in reader.spans(path, 1 << 30) for page in reader.read(span, Options(Problems("skip")))]
    assert len(pages) > 5
    assert count_holes([passage for page in pages for passage in page.passages]) <= most_holes
    assert count_lost([*articles(path)]) <= most_lost
