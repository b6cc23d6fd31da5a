"""Reads plain text and markdown: one document a file, its paragraphs in their order.

Rules, marks of emphasis and lines that only say where a link leads are no text; nor are headings, rows of tables and
code in markdown: in other files `#` and `|` may begin a line of a log, of a program or of a chat. Project Gutenberg's
header and licence are removed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from data_prep.readers import cutting
from data_prep.readers.cutting import read_content, whole
from data_prep.readers.foreign import find_web_page
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document, Options, Span, unpacked_name
from data_prep.readers.tidying import unescape
from data_prep.readers.wikitext import remove_tags

MARKDOWN = (".md", ".markdown")
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")

# What begins a line is looked for from the line end before it: that is much faster than to try ^ at each character.
GUTENBERG_START = re.compile(
    r"\n(?:\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG(?:[^*\n]*(?:\n[^*\n]+){0,3}\*\*\*.*|.*)"
    r"|\*END\*? ?THE SMALL PRINT!.*)$"
    r"(?:\s*(?:Produced|Transcribed|E-?text prepared|This e(?:text|book) was (?:produced|prepared)) by\b.*(?:\n.+)*)?",
    re.MULTILINE | re.IGNORECASE,
)
GUTENBERG_END = re.compile(
    r"\n(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG"
    r"|End of (?:the |this )?Project Gutenberg(?:['’]s| E-?(?:book|text))).*",
    re.IGNORECASE,
)
LINE_END = re.compile(r"\r\n?")
BLANK_LINE = re.compile(r"\n\s*\n")
FRONT_MATTER = re.compile(r"---\n(?:[\w-]+:.*\n|[ \t]+.*\n|- .*\n)*---\n")
FENCE = re.compile(r"^(```|~~~)`*[^`\n]*\n.*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
RULE = re.compile(r"\n[-*_= \t]+$", re.MULTILINE)  # also what underlines a heading
UNDERLINED = re.compile(r"\n\n.+\n(?:=+|-{3,})[ \t]*$", re.MULTILINE)
HEADINGS = "headings, rows of tables and targets of links"
TARGET = r" {0,3}\[[^\]\n]+\]:[ \t]+<?(?:https?:|www\.|[/#.]).*"  # where a link leads
NO_TEXT = re.compile(
    r"\n(?: {0,3}#{1,6}(?:[ \t].*)?"  # a heading
    r"|[ \t]*\|.*\|[ \t]*"  # a row of a table
    rf"|{TARGET})$",
    re.MULTILINE,
)
TARGET_LINE = re.compile(rf"\n{TARGET}$", re.MULTILINE)
QUOTE = re.compile(r"^[ \t]*(?:>[ \t]?)+", re.MULTILINE)
BULLET = re.compile(r"\n[ \t]*[-*+][ \t]+")
NUMBER = re.compile(r"^[ \t]*\d{1,3}[.)][ \t]+", re.MULTILINE)
IMAGE = re.compile(r"!\[[^\[\]]*\]\([^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)")
LINK = re.compile(r"\[([^\[\]]*)\](?:\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)|\[\d+\])")
STARS = re.compile(r"(?<![\w\\*])(\*{1,3})(?![\s*])([^*]+)(?<![\s\\])\1(?![\w*])")
UNDERSCORES = re.compile(r"(?<![\w\\])(_{1,3})(?![\s_])([^_]+)(?<![\s\\])\1(?!_)")  # with _aw_fully and its like
EMPHASISED = itemgetter(2)  # the words between such marks
ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+.!>|~-])")


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads a file as one document, named after the file."""
    path = Path(span.path)
    data = bytearray()
    for block in read_content(path, span.end):
        data += block
        if len(data) > cutting.LARGEST_DOCUMENT:
            cure = "cut it up, or is it one sentence a line (--format sentences)?"
            options.problems.leave_document_out(f"{path}: {cutting.too_large('one document')}", cure)
            return
        if len(data) >= options.limit:
            del data[data.rfind(b"\n") + 1 or options.limit :]
            while data and data[-1] & 0xC0 == 0x80:  # cut within a character
                data.pop()
            break
    text = options.problems.decode(bytes(data), span, 0)
    if text is not None:
        name = unpacked_name(path)
        markdown = name.lower().endswith(MARKDOWN)
        paragraphs = passages(text, markdown, options.problems.no_text)
        yield Document(f"{path.parent.name}/{path.name}", Path(name).stem, paragraphs)


def passages(text: str, markdown: bool, no_text: Counter[str]) -> list[str]:
    """Finds the paragraphs of a book and puts every one on one line; counts what is left out between them."""
    text = without_gutenberg(LINE_END.sub("\n", text.removeprefix("\ufeff")))
    if markdown:
        text = _without_blocks(text, no_text)
    text = RULE.sub("\n\n", f"\n{text}")
    text, lines = (NO_TEXT if markdown else TARGET_LINE).subn("\n", text)
    if lines:
        no_text[HEADINGS if markdown else "targets of links"] += lines
    paragraphs = BLANK_LINE.split(text[1:])
    if markdown:
        paragraphs = [_without_marks(item) for paragraph in paragraphs for item in _items(paragraph.lstrip("\n"))]
    else:
        paragraphs = [UNDERSCORES.sub(EMPHASISED, raw) if "_" in raw else raw for raw in paragraphs]
    joined = (" ".join(line for raw in paragraph.split("\n") if (line := raw.strip())) for paragraph in paragraphs)
    return [line for line in joined if line]


def _without_blocks(text: str, no_text: Counter[str]) -> str:
    """Frees markdown of what says how a text looks over whole lines: quotations stay, code and headings do not."""
    if ">" in text:
        text = QUOTE.sub("", text)
    if front := FRONT_MATTER.match(text):
        text = text[front.end() :]
        no_text["front matter"] += 1
    if "```" in text or "~~~" in text:
        text, blocks = FENCE.subn("", text)
        if blocks:
            no_text["blocks of code"] += blocks
    text, headings = UNDERLINED.subn("\n\n", f"\n\n{text}")
    if headings:
        no_text[HEADINGS] += headings
    return text


def _items(paragraph: str) -> list[str]:
    """Divides a list into its items; a line within a paragraph that begins with a number is none."""
    parts = BULLET.split(f"\n{paragraph}")
    parts[0] = parts[0][1:]
    return [item for part in parts for item in (NUMBER.split(part) if NUMBER.match(part) else (part,))]


def _without_marks(text: str) -> str:
    """Frees a paragraph of markdown: links and emphasis leave their words, images nothing."""
    text = remove_tags(text)
    if "[" in text:
        text = LINK.sub(r"\1", IMAGE.sub("", text))
    for _ in range(2):  # emphasis within emphasis
        if "*" in text:
            text = STARS.sub(EMPHASISED, text)
        if "_" in text:
            text = UNDERSCORES.sub(EMPHASISED, text)
    if "\\" in text:
        text = ESCAPED.sub(r"\1", text)
    return unescape(text)


def without_gutenberg(text: str) -> str:
    """Frees the books of Project Gutenberg in a text of their headers and licences, whose marks are others in old
    files."""
    text = f"\n{text}"
    start = GUTENBERG_START.search(text)
    end = GUTENBERG_END.search(text, start.end() if start else 0)
    if start and not end and (end := GUTENBERG_END.search(text)):
        start = None
    books, begin = [], start.end() if start else 1
    while end:
        books.append(text[begin : end.start() + 1])
        start = GUTENBERG_START.search(text, end.end())
        if not start or start[0].startswith("\n*END"):  # small print, which an old file has behind its only book
            return "".join(books)
        begin, end = start.end(), GUTENBERG_END.search(text, start.end())
    return "".join([*books, text[begin:]])


def detect(name: str, head: bytes) -> bool:
    """Tells a text whose name says nothing by having nothing but text in it."""
    rest = len(head) - len(head.decode(errors="ignore").encode())  # the last character may be cut
    return "." not in name and rest < 4 and not CONTROL.search(head)


READER = Reader(
    read, whole, (".txt", ".text", *MARKDOWN), detect=detect, order=8, is_plain=True, find_fault=find_web_page
)
