"""Reads the format of the original BERT scripts: one sentence on every line, an empty line between documents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.cutting import ranges, records
from data_prep.readers.foreign import find_web_page
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document, Options, Span

OPENING = re.compile(rb"\n[ \t\r]{0,100}\n(?=([ \t\r]{0,100}\S))")
CLOSING = re.compile(rb"\n[ \t\r]*\n\s*\Z")
SENTENCE_END = re.compile(r"[.!?…。！？][\s\"')\]”’»」]*$")
TWO_SENTENCES = re.compile(r"[a-z]{2}[.!?][\"')\]”’]* +[\"'(“‘]*[A-Z]| [.!?] [a-z]|[。！？][”’」]*\w")
FEWEST = 4  # lines without which the format is not recognised


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads the documents that begin in a span."""
    name = Path(span.path).name
    for offset, record in records(span, OPENING, options.problems, CLOSING):
        text = options.problems.decode(record, span, offset)
        if text is None:
            continue
        sentences = [line.strip() for line in text.replace("\r", "\n").split("\n")]
        yield Document(f"{name}:{offset}", "", [sentence for sentence in sentences if sentence])


def are_sentences(lines: list[str]) -> bool:
    """Returns whether most of the lines are exactly one sentence."""
    others = sum(not SENTENCE_END.search(line) or TWO_SENTENCES.search(line) is not None for line in lines)
    return len(lines) >= FEWEST and len(lines) - others > 0.8 * len(lines)


def detect(name: str, head: bytes) -> bool:
    """Recognises lines of one sentence that follow each other: a line of a book has less or more than one."""
    if not name.endswith((".txt", ".text")) and "." in name:
        return False
    lines = [line.strip() for line in head.decode(errors="replace").split("\n")]
    filled = [line for line in lines[:-1] if line]  # the last may be cut
    runs = sum(1 for before, line in itertools.pairwise(lines[:-1]) if before and line)
    return runs >= 0.3 * len(filled) and are_sentences(filled)


READER = Reader(read, ranges, detect=detect, order=7, is_plain=True, has_sentences=True, find_fault=find_web_page)
