"""Tells what a file is that none of our readers reads, and what its owner can do about it."""

from __future__ import annotations

import codecs
import re
import stat
from pathlib import Path
from typing import NamedTuple

from data_prep.common.errors import quote


class Foreign(NamedTuple):
    """A kind of file that is not read as it is."""

    what: str
    """What the file is, as its owner would call it."""
    cure: str = ""
    """What turns it into something that is read; nothing where it holds no text."""
    is_text: bool = False
    """Whether it can be read as plain text, if its owner wants that."""

    def cure_for(self, file: Path) -> str:
        """Spells the cure for one such file, as its owner may type it: FILE becomes its name, SAME a new name with the
        same ending."""
        new = quote(f"NEW{file.suffix or '.txt'}")
        return self.cure.replace("> SAME ", f"> {new} ").replace("FILE", quote(file))


TAR, TAR_MARK = Foreign("a tar archive", "tar -xf FILE -C FOLDER unpacks it; give --docs FOLDER"), slice(257, 262)
SIGNATURES = {
    b"\xff\xd8\xff": Foreign("a JPEG image"),
    b"\x89PNG": Foreign("a PNG image"),
    b"GIF8": Foreign("a GIF image"),
    b"%PDF-": Foreign("a PDF", "pdftotext FILE NEW.txt makes a text of it"),
    b"{\\rtf": Foreign("a document in RTF", "save it as plain text in UTF-8"),
    b"\xd0\xcf\x11\xe0": Foreign("an Office document", "save it as plain text in UTF-8"),
    b"PK\x03\x04": Foreign("a zip archive or a document in one (docx, odt, epub)", "unpack it, or save it as text"),
    b"\x1f\x8b": Foreign("compressed by gzip", "give it a name that ends in .gz"),
    b"BZh": Foreign("compressed by bzip2", "give it a name that ends in .bz2"),
    b"\x28\xb5\x2f\xfd": Foreign("compressed by Zstandard", "give it a name that ends in .zst"),
    b"\xfd7zXZ": Foreign("compressed by xz", "give it a name that ends in .xz"),
    b"\xff\xfe\0\0": Foreign("text in UTF-32", "iconv -f utf-32 -t utf-8 FILE > SAME makes UTF-8 of it"),
    b"\xff\xfe": Foreign("text in UTF-16", "iconv -f utf-16 -t utf-8 FILE > SAME makes UTF-8 of it"),
    b"\xfe\xff": Foreign("text in UTF-16", "iconv -f utf-16 -t utf-8 FILE > SAME makes UTF-8 of it"),
}
"""What a file is, by its first bytes."""
UTF_16 = {
    0: Foreign("text in UTF-16", "iconv -f utf-16be -t utf-8 FILE > SAME makes UTF-8 of it"),
    1: Foreign("text in UTF-16", "iconv -f utf-16le -t utf-8 FILE > SAME makes UTF-8 of it"),
}
"""Text in UTF-16 that begins without a mark, by which byte of a character is zero in Latin script."""
PAIRS = rb"(?:[!-~]{2}){1,500}?"
SEVEN_BITS = {
    "iso-2022-jp-2": re.compile(rb"\x1b\$(?:[@AB]|\([CD])%b\x1b" % PAIRS),
    "iso-2022-kr": re.compile(rb"\x1b\$\)C(?s:.{,500}?)\x0e%b\x0f" % PAIRS),
    "iso-2022-cn": re.compile(rb"\x1b\$\)[AEG](?s:.{,500}?)\x0e%b\x0f" % PAIRS),
    "hz": re.compile(rb"~\{%b~\}" % PAIRS),
    "utf-7": re.compile(rb"\+[A-Za-z0-9+/]+-?"),
}
"""How encodings that look like ASCII spell other characters, by their names in iconv; HZ has one in Python alone."""
READ_HZ = "import sys; print(open(sys.argv[1], encoding='hz').read(), end='')"
EAST_ASIAN = ("gb2312", "big5", "euc_jp", "euc_kr")
"""Encodings that give the lower codes to frequent characters."""
BINARY = Foreign("no text but binary data")
JSON_LINES = "import json, sys; [print(json.dumps(record)) for record in json.load(open(sys.argv[1]))]"
WEB_PAGE = Foreign("a web page", "save it as plain text", is_text=True)
HTML = re.compile(rb"[\s\xef\xbb\xbf]*<(?:!doctype html|html)", re.IGNORECASE)  # after byte-order marks
BY_NAME = {
    (".html", ".htm", ".xhtml"): WEB_PAGE,
    (".tex",): Foreign("LaTeX", "pandoc -t plain FILE -o NEW.txt makes a text of it"),
}
"""What a file with text in it is, by its name in small letters."""
NO_FILES = {
    stat.S_IFIFO: Foreign("a pipe", "write what comes out of it into a file"),
    stat.S_IFSOCK: Foreign("a socket"),
    stat.S_IFCHR: Foreign("a device"),
    stat.S_IFBLK: Foreign("a device"),
}
"""Pipes, sockets and devices, which are never opened, by the type in their status."""
MOST_ZEROS = 0.01  # share of a text's bytes; a few are dropped as BERT drops control characters


def not_text(head: bytes) -> Foreign | None:
    """Tells what a file is that cannot be read as text, by its first bytes; None where it can."""
    known = next((kind for start, kind in SIGNATURES.items() if head.startswith(start)), None)
    known = TAR if head[TAR_MARK] == b"ustar" else known
    if known or head.count(0) <= MOST_ZEROS * len(head):
        return known or _find_seven_bit_encoding(head)
    zeros = [head[first::2].count(0) for first in (0, 1)]
    if max(zeros) > 0.4 * len(head) and 20 * min(zeros) < max(zeros):
        return UTF_16[int(zeros[1] > zeros[0])]
    return BINARY


def _find_seven_bit_encoding(head: bytes) -> Foreign | None:
    """Recognizes an encoding that spells other characters in ASCII; None for plain ASCII and all else."""
    found = ((name, run.findall(head)) for name, run in SEVEN_BITS.items() if head.isascii())
    name = next((name for name, runs in found if runs and (name[:3] == "iso" or _fits_encoding(name, head, runs))), "")
    how = f'python -c "{READ_HZ}" FILE' if name == "hz" else f"iconv -f {name} -t utf-8 FILE"
    return Foreign(f"text in {name.upper()}", f"{how} > SAME makes UTF-8 of it") if name else None


def _fits_encoding(name: str, head: bytes, runs: list[bytes]) -> bool:
    """Tells whether the whole beginning decodes, and its runs to common characters that one script has.

    `user+tag@` and `~{ab~}` in plain text decode too, but to rare characters of several scripts.
    """
    decode = codecs.getincrementaldecoder(name)
    text, found = (decode("replace").decode(part) for part in (head, b"\n".join(runs)))
    found = found.replace("\n", "")
    low = sum(c < "\u3000" and c.isprintable() for c in found)
    usual = (sum(b"" < c.encode(codec, "ignore")[:1] < b"\xd8" for c in found) for codec in EAST_ASIAN)
    most = low if len({*found}) < 8 else max(low, *usual)
    return "\ufffd" not in text and len({*runs}) >= 3 and len(found) >= 8 and most >= 0.8 * len(found)


def find_web_page(path: Path, head: bytes) -> Foreign | None:
    """Tells whether a text is a web page, whose tags and scripts are no text."""
    return WEB_PAGE if HTML.match(head) else None


def unknown_text(name: str, head: bytes) -> Foreign:
    """Tells what a file is that is text, perhaps, but in no format that is read."""
    named = next((kind for suffixes, kind in BY_NAME.items() if name.endswith(suffixes)), None)
    kind = WEB_PAGE if HTML.match(head) else named
    if kind:
        return kind._replace(is_text=True)
    if head.lstrip().startswith(b"["):
        if name.endswith(".jsonl"):
            return Foreign("JSON lines that are lists", "each line must be an object with its text in a field")
        return Foreign("one list of JSON", f'python -c "{JSON_LINES}" FILE > NEW.jsonl makes JSON lines of it')
    return Foreign("of no format that is known", is_text=True)
