"""Reads JSON lines: an object on every line, its text in one field (`text` unless --text-field says otherwise).

`id` (or `_id`, `docid`) and `title` are taken where they are there; .gz, .bz2, .xz and .zst are expanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.readers.cutting import number_lines, ranges, records
from data_prep.readers.foreign import Foreign
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.formats.wikiextractor import paragraphs, remove_marks
from data_prep.readers.reader import Document, Options, Span

OPENING = re.compile(rb"\n([^\r\n])")
CLOSING = re.compile(rb"\n\Z")
OVER_LINES = Foreign("JSON whose objects go over several lines", "jq -c . FILE > NEW.jsonl makes JSON lines of it")
ID_FIELDS = ("id", "_id", "docid")
WIKI_FIELDS = {"id", "url", "title"}  # what WikiExtractor writes, and the sets that are made from its output


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the lines that begin in a span, a document from every one."""
    name = Path(span.path).name
    for offset, where, record in number_lines(span, records(span, OPENING, options.problems, CLOSING)):
        line = options.problems.decode(record, span, offset)
        if line is None or not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            options.problems.leave_document_out(f"{where}: not a JSON object on one line: {error}")
            continue
        if fault := find_fault(content, options.text_field):
            options.problems.leave_document_out(f"{where}: {fault}", _cure(content, options))
            continue
        text = options.problems.clean(content[options.text_field] or "", where)
        title = options.problems.clean(str(content.get("title") or ""), where)
        if text is None or title is None:
            continue
        if content.keys() >= WIKI_FIELDS:
            text = remove_marks(text)
        given = next((content[key] for key in ID_FIELDS if content.get(key) is not None), f"{name}:{offset}")
        yield Document(str(given).encode(errors="replace").decode(), title, paragraphs(text, title))


def find_fault(content: Any, field: str) -> str:
    """Describes why a record has no text; returns an empty string if the field is a text or null."""
    if not isinstance(content, dict):
        return f"a JSON {type(content).__name__}; each line must be an object with a field {field!r}"
    if field not in content:
        return f"no field {field!r}; there is: {', '.join(sorted(content)) or 'none'}"
    if content[field] is not None and not isinstance(content[field], str):
        return f"the field {field!r} is a {type(content[field]).__name__}, not a text"
    return ""


def _cure(content: Any, options: Options) -> str:
    """Suggests the longest text of a record as its field; returns an empty string if it is no object."""
    if not isinstance(content, dict):
        return ""
    return options.field_cure({name: len(value) for name, value in content.items() if isinstance(value, str)})


def detect(name: str, head: bytes) -> bool:
    """Recognises JSON lines by an object at the beginning of the file."""
    return head.lstrip().startswith(b"{") and b'":' in head.replace(b" ", b"")


def find_lines(path: Path, head: bytes) -> Foreign | None:
    """Recognises JSON objects over several lines: the first line is no object, and the next begins none."""
    lines = [line for line in head.split(b"\n") if line.strip()]
    if len(lines) < 2 or lines[1].startswith(b"{"):
        return None
    try:
        return None if isinstance(json.loads(lines[0]), dict) else OVER_LINES
    except (ValueError, RecursionError):
        return OVER_LINES


READER = Reader(read, ranges, detect=detect, order=6, has_fields=True, find_fault=find_lines)
