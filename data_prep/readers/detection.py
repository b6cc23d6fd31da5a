"""Finds the format of a file by its name and its first bytes, or says what the file is that has none."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from data_prep.readers import READERS
from data_prep.readers.books import SUFFIXES
from data_prep.readers.foreign import NOT_WHOLE, OVER_LINES, Foreign, not_text, unknown_text
from data_prep.readers.identity import Look
from data_prep.readers.jsonlines import goes_over_lines
from data_prep.readers.parquet import is_whole
from data_prep.readers.reader import COMPRESSED

TEXTS = ("sentences", "text")
"""Formats that are told by how a text looks, so that one may be taken for the other."""
BY_CONTENT, BY_NAME, AS_SAID = "by content", "by name", "as --format says"
AS_OTHERS = "as most here, though with what looks like a sentence a line"
NO_NAME = b"\x00"  # the beginning of a file that only its name can make a text


class Found(NamedTuple):
    """The format of a file."""

    format: str
    """The name of the reader that reads the file."""
    how: str
    """How the format was found: `BY_CONTENT`, `BY_NAME`, `AS_SAID` or `AS_OTHERS`."""


def find_format(path: Path, seen: Look, said: str | None, keeps_whole_part: bool = False) -> Found | Foreign:
    """Finds the format of a file, where the user has not said it; tells what the file is where it cannot be read.

    A source that is said to be plain text may have JSON lines and the like beside it: nobody wants those read as text.
    A file whose head is damaged is read where the user wants what is whole of it, if there is anything.
    """
    head = seen.head
    if seen.is_damaged and not (head and keeps_whole_part):
        return Foreign(f"truncated or damaged {path.suffix}, or not compressed at all", "fetch or pack it anew")
    kind = _format_of(path, head, said)
    return NOT_WHOLE if isinstance(kind, Found) and kind.format == "parquet" and not is_whole(str(path)) else kind


def _format_of(path: Path, head: bytes, said: str | None) -> Found | Foreign:
    """Finds the format that the name and the first bytes of a file tell, where the user has not said it."""
    name = path.name.lower().removesuffix(path.suffix.lower() if path.suffix in COMPRESSED else "")
    reader = next((reader for reader in READERS.values() if reader.detect(name, head)), None)
    is_record = reader is not None and reader.name not in TEXTS and not name.endswith(SUFFIXES)
    if said is not None and not (said in TEXTS and is_record):
        return (not_text(head) if said != "parquet" else None) or Found(said, AS_SAID)
    if (reader is None or reader.name in (*TEXTS, "csv")) and (foreign := not_text(head)):
        return foreign
    if reader is None:
        return unknown_text(name, head)
    if reader.name == "jsonl" and goes_over_lines(head):
        return OVER_LINES
    return Found(reader.name, BY_NAME if reader.detect(name, NO_NAME) else BY_CONTENT)
