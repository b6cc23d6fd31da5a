"""Reads JSON lines: an object on every line, its text in one field (`text` unless --text-field says otherwise).

`id` (or `_id`, `docid`) and `title` are taken where they are there; .gz, .bz2, .xz and .zst are expanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.readers.cutting import numbered, ranges, records
from data_prep.readers.reader import Document, Options, Reader, Span
from data_prep.readers.wikiextractor import paragraphs, without_marks

OPENING = re.compile(rb"\n([^\r\n])")
CLOSING = re.compile(rb"\n\Z")
ID_FIELDS = ("id", "_id", "docid")
WIKI_FIELDS = {"id", "url", "title"}  # what WikiExtractor writes, and the sets that are made from its output


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the lines that begin in a span, a document from every one."""
    name = Path(span.path).name
    for offset, where, record in numbered(span, records(span, OPENING, options.problems, CLOSING)):
        line = options.problems.decode(record, span, offset)
        if line is None or not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            options.problems.bad(f"{where}: not a JSON object on one line: {error}")
            continue
        if fault := find_fault(content, options.text_field):
            options.problems.bad(f"{where}: {fault}", _cure(content, options))
            continue
        text = options.problems.clean(content[options.text_field] or "", where)
        title = options.problems.clean(str(content.get("title") or ""), where)
        if text is None or title is None:
            continue
        if content.keys() >= WIKI_FIELDS:
            text = without_marks(text)
        given = next((content[key] for key in ID_FIELDS if content.get(key) is not None), f"{name}:{offset}")
        yield Document(str(given).encode(errors="replace").decode(), title, paragraphs(text, title))


def find_fault(content: Any, field: str) -> str:
    """Says what keeps a record from having a text; nothing if it has one, or null in its place."""
    if not isinstance(content, dict):
        return f"a JSON {type(content).__name__}; each line must be an object with a field {field!r}"
    if field not in content:
        return f"no field {field!r}; there is: {', '.join(sorted(content)) or 'none'}"
    if content[field] is not None and not isinstance(content[field], str):
        return f"the field {field!r} is a {type(content[field]).__name__}, not a text"
    return ""


def _cure(content: Any, options: Options) -> str:
    """Says which field may have the text of such a record: the longest; nothing for what is no record."""
    if not isinstance(content, dict):
        return ""
    return options.field_cure({name: len(value) for name, value in content.items() if isinstance(value, str)})


def detect(name: str, head: bytes) -> bool:
    """Tells JSON lines by a file that begins with an object."""
    return head.lstrip().startswith(b"{") and b'":' in head.replace(b" ", b"")


def goes_over_lines(head: bytes) -> bool:
    """Tells JSON that is laid out over several lines: the first of them is no object, and the next begins none."""
    lines = [line for line in head.split(b"\n") if line.strip()]
    if len(lines) < 2 or lines[1].startswith(b"{"):
        return False
    try:
        return not isinstance(json.loads(lines[0]), dict)
    except (ValueError, RecursionError):
        return True


READER = Reader("jsonl", detect, read, ranges)
