"""Reads JSON lines: an object on every line, its text in one field (`text` unless --text-field says otherwise).

`id` (or `_id`, `docid`) and `title` are taken where they are there; .gz, .bz2, .xz and .zst are expanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError
from data_prep.readers.cutting import ranges, records
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
    for offset, record in records(span, OPENING, options.problems, CLOSING):
        line, where = options.problems.decode(record, span, offset), span.name_place(offset)
        if line is None or not line.strip():
            continue
        try:
            content = parse_object(line)
        except UserError as error:
            options.problems.leave_document_out(f"{where}: {error}")
            continue
        if not isinstance(content.get(options.text_field, 0), str | None):
            fault = options.explain_missing_text(where, content)
            options.problems.leave_document_out(fault.what, fault.cure)
            continue
        text = options.problems.clean(content[options.text_field] or "", where)
        title = options.problems.clean(str(content.get("title") or ""), where)
        if text is None or title is None:
            continue
        if content.keys() >= WIKI_FIELDS:
            text = remove_marks(text)
        given = next((content[key] for key in ID_FIELDS if content.get(key) is not None), f"{name}:{offset}")
        yield Document(str(given).encode(errors="replace").decode(), title, paragraphs(text, title))


def parse_object(text: str) -> dict[str, Any]:
    """Parses the JSON object that stands on a line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not a JSON object on one line: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f'a JSON {type(found).__name__}; each line must be an object, such as {{"text": "…"}}')
    return found


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
