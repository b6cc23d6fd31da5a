"""Reads a corpus of real English that every machine has: the documentation strings of its Python packages.

A document is a module: the strings of its classes and functions, in the order of the file.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.cutting import whole
from data_prep.readers.reader import Document, Options, Reader, Span

NAME = "demo"
SHORTEST = 200  # characters of text that make a module worth reading
DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(.*?)\1', re.MULTILINE | re.DOTALL)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
CODE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |:\w+|@|#|\$|[-=~^*+|`]{3,})")
PROSE = re.compile(r"[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}")


def files() -> list[Path]:
    """Lists every other Python file of the standard library and the installed packages: some 20 MB of text."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    found = {path: folder for folder in folders for path in folder.rglob("*.py") if path.is_file()}
    skipped = {"test", "tests", "__pycache__"}
    return sorted(path for path, folder in found.items() if not skipped & set(path.relative_to(folder).parts))[::2]


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads a module as a document, if it has enough text."""
    path = Path(span.path)
    source = path.read_bytes().decode(errors="ignore")
    passages = [passage for text in DOCSTRING.findall(source) for passage in prose(text[1])]
    if sum(map(len, passages)) >= SHORTEST:
        yield Document("/".join(path.parts[-3:]), path.stem, passages)


def prose(text: str) -> list[str]:
    """Finds the paragraphs of a documentation string that read as sentences."""
    paragraphs = []
    for paragraph in BLANK_LINE.split(text):
        lines = [line.strip() for line in paragraph.split("\n") if not CODE.match(line)]
        joined = " ".join(" ".join(lines).split())
        if PROSE.search(joined):
            paragraphs.append(joined)
    return paragraphs


READER = Reader(
    name=NAME,
    about="the documentation strings of the installed Python packages",
    detect=lambda name, head: False,
    read=read,
    spans=whole,
)
