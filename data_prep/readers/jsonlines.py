"""JSON lines: an object on each line, its text in one field (`text` unless --text-field says otherwise).

`id` (or `_id`, `docid`) and `title` are taken where they are there; .gz, .bz2 and .zst are expanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.documents import Document
from data_prep.errors import UserError
from data_prep.readers.base import Options, Reader, Span, ranges, records

OPENING = re.compile(rb"\n(?=[^\r\n])")
ID_FIELDS = ("id", "_id", "docid")


def read(span: Span, options: Options) -> Iterator[Document]:
    name = Path(span.path).name
    for offset, record in records(span, OPENING):
        where = f"{span.path}: byte {offset:,}"
        line = options.problems.decode(record, span.path, offset)
        if line is None or not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            options.problems.bad(f"{where}: not a JSON object: {error}")
            continue
        text = options.problems.clean(text_of(content, options.text_field, where), where)
        title = options.problems.clean(str(content.get("title") or ""), where)
        if text is None or title is None:
            continue
        given = next((content[key] for key in ID_FIELDS if key in content), None)
        yield Document(f"{name}:{offset}" if given is None else ascii_safe(given), title, paragraphs(text))


def paragraphs(text: str) -> list[str]:
    """The lines of a text that hold something."""
    return [line for line in text.split("\n") if line.strip()]


def ascii_safe(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def text_of(content: Any, field: str, where: str) -> str:
    """The text of a record; a record without it means that the whole file is not what the user thinks."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: a JSON {type(content).__name__}; each line must be an object with a field {field!r}")
    if field not in content:
        known = ", ".join(sorted(content)) or "none"
        raise UserError(f"{where}: no field {field!r}; there is: {known}. Name it with --text-field")
    text = content[field]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{where}: the field {field!r} is a {type(text).__name__}, not a text. Name it with --text-field"
        )
    return text or ""


def detect(name: str, head: bytes) -> bool:
    return head.lstrip().startswith(b"{") and b'":' in head.replace(b" ", b"")


READER = Reader(
    name="jsonl",
    about="JSON lines with a text field, as WikiExtractor --json and most corpora have",
    detect=detect,
    read=read,
    spans=ranges,
)
