"""The format of the original BERT scripts: one sentence on each line, an empty line between documents."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.documents import Document
from data_prep.readers.base import COMPRESSED, Options, Reader, Span, ranges, records

OPENING = re.compile(rb"\n[ \t\r]*\n(?=\S)")
SENTENCE_END = re.compile(rb"[.!?][\"')\]]*\s*$")
TWO_SENTENCES = re.compile(rb"[a-z]{2}[.!?][\"')\]]* +[A-Z]")


def read(span: Span, options: Options) -> Iterator[Document]:
    name = Path(span.path).name
    for offset, record in records(span, OPENING):
        text = options.problems.decode(record, span.path, offset)
        if text is None:
            continue
        sentences = [line.strip() for line in text.splitlines() if line.strip()]
        yield Document(f"{name}:{offset}", "", sentences)


def detect(name: str, head: bytes) -> bool:
    """A text file most of whose lines are exactly one sentence, in more than one document."""
    if not name.removesuffix(next((s for s in COMPRESSED if name.endswith(s)), "")).endswith(".txt"):
        return False
    lines = head.split(b"\n")[:-1]  # the last may be cut
    filled = [line for line in lines if line.strip()]
    if len(filled) < 4 or len(filled) == len(lines):
        return False
    whole = sum(1 for line in filled if SENTENCE_END.search(line) and not TWO_SENTENCES.search(line))
    runs = sum(1 for before, line in itertools.pairwise(lines) if before.strip() and line.strip())
    return whole > 0.8 * len(filled) and runs > 0.5 * len(filled)


READER = Reader(
    name="sentences",
    about="one sentence a line, an empty line between documents",
    detect=detect,
    read=read,
    spans=ranges,
    has_sentences=True,
)
