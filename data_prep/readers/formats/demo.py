"""Reads a corpus of real English that every machine has: the documentation strings of its Python packages.

A document is a module: the strings of its classes and functions, in the order of the file.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.cutting import read_content, whole
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document, Options, Span

SHORTEST = 200  # characters of text that make a module worth reading
DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(.*?)\1', re.MULTILINE | re.DOTALL)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
CODE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |:\w+|@|#|\$|[-=~^*+|`]{3,})")
PROSE = re.compile(r"[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}")


def files() -> list[Path]:
    """Lists the files of the corpus: some 20 MB of text."""
    return halves()[0]


def halves() -> tuple[list[Path], list[Path]]:
    """Lists the Python files of the standard library and the installed packages: those that are the corpus, and as many
    between them that no corpus has, for tasks whose texts a model is to see for the first time."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    skipped = {"test", "tests", "__pycache__", "site-packages"}  # the last inside another folder: not this Python's own
    found = [(path, path.relative_to(folder).parts) for folder in folders for path in folder.rglob("*.py")]
    paths = sorted({path for path, parts in found if not skipped & set(parts) and path.is_file()})
    return paths[::2], paths[1::2]


def read(span: Span, options: Options) -> Iterator[Document]:
    """Reads a module as a document, if it has enough text."""
    path = Path(span.path)
    source = b"".join(read_content(path, span.end)).decode(errors="ignore")
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


READER = Reader(read, whole, order=9, list_files=files)
