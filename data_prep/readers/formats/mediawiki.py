"""Reads MediaWiki's XML dumps, plain or .bz2, as Wikipedia publishes them; a multistream dump is read in parallel.

It reads articles only: no redirects, no disambiguation pages, nothing outside the main namespace. A page is parsed by
itself, so a document type or an entity that a hostile file defines at its top is never seen by the parser.
"""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from data_prep.readers.cutting import EDGE, bz2_ranges, decode_element, read_ends, records
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document, Options, Span
from data_prep.readers.wikitext import Wikitext, is_disambiguation

OPENING = re.compile(rb"(<page)[\s>]")
END = b"</page>"
CLOSING = re.compile(rb"</page>\s*\Z")
DUMP = re.compile(rb"<(mediawiki|page)[\s>]")
NAMESPACE = re.compile(r'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
REDIRECTS = "redirects"
REDIRECT = re.compile(r"\s*#(?:redirect|[^\W\d_][^\s\[]*[ \t]*\[\[)", re.IGNORECASE)  # in any language
FILE_NAMESPACES = ("6", "14")  # files and categories: their links are no text


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the articles among the pages that begin in a span."""
    no_text = options.problems.no_text
    wikitext = Wikitext(_skipped_prefixes(span.path), no_text)
    for offset, record in records(span, OPENING, options.problems, CLOSING):
        if not record.startswith(b"<page"):
            continue  # the head of the dump
        text = decode_element(record, record.find(END), END, span, offset, options.problems)
        if text is None:
            continue
        try:
            page = ElementTree.fromstring(text)
        except ElementTree.ParseError as error:
            options.problems.leave_document_out(f"{span.name_place(offset)}: broken XML in this page: {error}")
            continue
        document = _article(page, wikitext)
        if isinstance(document, Document):
            yield document
        else:
            no_text[document] += 1


def _article(page: ElementTree.Element, wikitext: Wikitext) -> Document | str:
    """Makes a document of a page, or says what the page is if it is no article."""
    if page.findtext("{*}ns", "0").strip() != "0":
        return "pages outside the main namespace"
    if page.find("{*}redirect") is not None:
        return REDIRECTS
    revisions = page.findall("{*}revision/{*}text")  # a dump with the history has the newest at the end
    title, text = page.findtext("{*}title", ""), (revisions[-1].text if revisions else "") or ""
    if REDIRECT.match(text):
        return REDIRECTS
    if is_disambiguation(title, text):
        return "disambiguation pages"
    return Document(page.findtext("{*}id", ""), title, wikitext.passages(text))


@functools.cache
def _skipped_prefixes(path: str) -> frozenset[str]:
    """Reads what the dump's own language calls the namespaces whose links are no text."""
    head = read_ends(path, 0, EDGE).head.decode(errors="replace").partition("<page")[0]
    return frozenset(name.lower() for key, name in NAMESPACE.findall(head) if key in FILE_NAMESPACES)


def detect(name: str, head: bytes) -> bool:
    """Tells a dump by XML that opens a wiki or a page."""
    return head.lstrip().startswith((b"<?xml", b"<!", b"<mediawiki", b"<page")) and bool(DUMP.search(head))


READER = Reader(read, bz2_ranges, detect=detect, order=1)
