"""Plain text and markdown: one document a file, its paragraphs in their order.

Headings, rules and marks of emphasis are no text. Project Gutenberg's header and licence are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.documents import Document
from data_prep.errors import UserError
from data_prep.readers.base import COMPRESSED, LARGEST_DOCUMENT, Options, Reader, Span, decompressed, whole

SUFFIXES = (".txt", ".text", ".md", ".markdown")
MARKDOWN = (".md", ".markdown")
GUTENBERG_START = re.compile(r"^\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG EBOOK.*$", re.MULTILINE | re.IGNORECASE)
GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg).*",
    re.MULTILINE | re.IGNORECASE,
)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
NO_TEXT = re.compile(
    r"^(?: {0,3}#{1,6}(?:[ \t].*)?"  # a heading
    r"|[ \t]*(?:[-*_=][ \t]*){3,}"  # a rule, or what underlines a heading
    r"|[ \t]*\|.*\|[ \t]*"  # a row of a table
    r"|[ \t]*!\[[^\]]*\]\([^)]*\)[ \t]*)$",  # an image
    re.MULTILINE,
)
UNDERLINED = re.compile(r"^[^\n]+\n(?:=+|-{3,})[ \t]*$", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*(?:\s+\"[^\"]*\")?\)")
EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|_{1,3})(?=\S)(.+?)(?<=\S)\1(?!\w)", re.DOTALL)
QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+.!>-])")


def read(span: Span, options: Options) -> Iterator[Document]:
    path = Path(span.path)
    data = bytearray()
    for block in decompressed(path):
        data += block
        if len(data) > LARGEST_DOCUMENT:
            raise UserError(
                f"{path}: one document of more than {LARGEST_DOCUMENT >> 20} MB; cut it up, "
                "or is it one sentence a line (--format sentences)?"
            )
    text = options.problems.decode(bytes(data), span.path, 0)
    if text is None:
        return
    title = path.name.removesuffix(path.suffix if path.suffix in COMPRESSED else "")
    markdown = title.endswith(MARKDOWN)
    title = title.removesuffix(Path(title).suffix)
    yield Document(f"{path.parent.name}/{path.name}", title, passages(text, markdown))


def passages(text: str, markdown: bool) -> list[str]:
    """The paragraphs of a book, each on one line."""
    text = without_gutenberg(text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
    if markdown:
        text = FENCE.sub("", text)
        text = UNDERLINED.sub("", text)
        text = QUOTE.sub("", text)
    text = NO_TEXT.sub("", text)
    paragraphs = (" ".join(paragraph.split()) for paragraph in BLANK_LINE.split(text))
    if not markdown:
        return [paragraph for paragraph in paragraphs if paragraph]
    plain = (ESCAPED.sub(r"\1", EMPHASIS.sub(r"\2", LINK.sub(r"\1", paragraph))) for paragraph in paragraphs)
    return [paragraph for paragraph in plain if paragraph]


def without_gutenberg(text: str) -> str:
    """What stands between Project Gutenberg's header and its licence."""
    if start := GUTENBERG_START.search(text):
        text = text[start.end() :]
    if end := GUTENBERG_END.search(text):
        text = text[: end.start()]
    return text


def detect(name: str, head: bytes) -> bool:
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.lower().endswith(SUFFIXES)


READER = Reader(
    name="text",
    about="plain text or markdown, one document a file: books",
    detect=detect,
    read=read,
    spans=whole,
)
