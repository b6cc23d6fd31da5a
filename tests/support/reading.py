"""Files of every format for tests of readers, and reading them as a worker does."""

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.reader import Document, Options, Problems
from data_prep.readers.sources import find_files
from data_prep.settings import Errors

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(
    path: Path, format: str, errors: Errors = "fail", step: int = 1 << 20, **options: Any
) -> tuple[list[Document], Problems]:
    """Reads all documents of a file, span by span; returns them with what was wrong with the file."""
    problems, reader = Problems(errors), list_readers()[format]
    spans = reader.spans(path, step)
    return [document for span in spans for document in reader.read(span, Options(problems, **options))], problems


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def passages(path: Path, format: str, **options: Any) -> list[list[str]]:
    return [document.passages for document in read(path, format, **options)[0]]


def detected(path: Path) -> str:
    return find_files([str(path)], None)[0].format


def in_streams(data: bytes, size: int) -> bytes:
    """Compresses as pbzip2 does: a stream for every so many bytes, wherever that cuts the text."""
    return b"".join(bz2.compress(data[at : at + size]) for at in range(0, len(data), size))


def wiki_dump(*pages: str, head: str = "") -> bytes:
    space = 'xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en"'
    names = '<namespace key="6" case="first-letter">Datei</namespace><namespace key="0" case="first-letter" />'
    siteinfo = f"<siteinfo><sitename>X</sitename><namespaces>{names}</namespaces></siteinfo>"
    return f"{head}<mediawiki {space}>\n  {siteinfo}\n{''.join(pages)}</mediawiki>\n".encode()


def page(title: str, text: str, number: int = 1, more: str = "", namespace: int = 0) -> str:
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{namespace}</ns>\n    <id>{number}</id>{more}\n    <revision>\n"
        f"      <id>9{number}</id>\n      <contributor><username>N</username><id>7</id></contributor>\n      "
        f'<text bytes="{len(text)}" sha1="x" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


def many_pages(count: int = 300) -> list[str]:
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefghij", k=7)) for _ in range(40_000)]
    return [page(f"T{n}", f"'''T{n}''' is {' '.join(words[n * 100 : n * 100 + 100])}.", n) for n in range(count)]
