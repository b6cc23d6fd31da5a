"""WikiExtractor's output with tags: `<doc id= url= title=>`, the title on a line, paragraphs, `</doc>`.

Its other output, `--json`, is JSON lines, and is read as such.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from data_prep.documents import Document
from data_prep.readers.base import Options, Reader, Span, ranges, records

OPENING = re.compile(rb"\n(?=<doc )")
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def read(span: Span, options: Options) -> Iterator[Document]:
    for offset, record in records(span, OPENING):
        end = record.rfind(b"</doc>")
        if end < 0:
            options.problems.bad(f"{span.path}: byte {offset:,}: a <doc> without its </doc>: the file is cut short")
            continue
        text = options.problems.decode(record[:end], span.path, offset)
        if text is None:
            continue
        tag, _, body = text.partition("\n")
        attributes = dict(ATTRIBUTE.findall(tag))
        title = html.unescape(attributes.get("title", ""))
        passages = [line for line in body.split("\n") if line.strip()]
        if passages and html.unescape(passages[0]).strip() == title.strip():
            del passages[0]
        yield Document(attributes.get("id", ""), title, passages)


READER = Reader(
    name="wikiextractor",
    about="WikiExtractor's output: <doc id= url= title=> ... </doc>",
    detect=lambda name, head: head.lstrip().startswith(b"<doc "),
    read=read,
    spans=ranges,
)
