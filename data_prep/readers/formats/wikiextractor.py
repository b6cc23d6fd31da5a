"""Reads WikiExtractor's output with tags: `<doc id= url= title=>`, the title on a line, paragraphs, `</doc>`.

Its other output, `--json`, is JSON lines, and is read as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.cutting import decode_element, ranges, records
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document, Options, Span
from data_prep.readers.tidying import unescape
from data_prep.readers.wikitext import remove_tags

OPENING = re.compile(rb"\n(<doc )")
END = b"</doc>"
CLOSING = re.compile(rb"</doc>\s*\Z")
ATTRIBUTE = re.compile(r'(\w+)="(.*?)"(?=\s+\w+="|\s*>)')


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the documents whose tags open in a span."""
    name = Path(span.path).name
    for offset, record in records(span, OPENING, options.problems, CLOSING):
        if not record.strip():
            continue
        if not record.lstrip().startswith(b"<doc "):
            options.problems.leave_document_out(f"{span.name_place(offset)}: text that is in no <doc>")
            continue
        text = decode_element(record, record.rfind(END), END, span, offset, options.problems)
        if text is None:
            continue
        tag, _, body = text.lstrip().removesuffix("</doc>").partition("\n")
        attributes = dict(ATTRIBUTE.findall(tag))
        title = unescape(attributes.get("title", ""))
        yield Document(attributes.get("id") or f"{name}:{offset}", title, paragraphs(remove_marks(body), title))


def paragraphs(text: str, title: str) -> list[str]:
    """Lists the lines of a text that hold something; a first line that is the title is none of its passages."""
    lines = list(filter(None, map(str.strip, text.split("\n"))))
    return lines[1:] if lines and lines[0] == title.strip() else lines


def remove_marks(text: str) -> str:
    """Frees a text of the tags that WikiExtractor left in it, and of its escaped characters."""
    return remove_tags(unescape(text))


READER = Reader(read, ranges, detect=lambda name, head: head.lstrip().startswith(b"<doc "), order=2)
