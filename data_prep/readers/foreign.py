"""Tells what a file is that none of our readers reads, and what its owner can do about it."""

from __future__ import annotations

import codecs
import re
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


def _in_encoding(name: str, how: str = "iconv -f {} -t utf-8") -> Foreign:
    """Describes text in another encoding than UTF-8, by its name in iconv."""
    return Foreign(f"text in {name.upper()}", f"{how.format(name)} FILE > SAME makes UTF-8 of it")


OFFICE_CURE = "unpack it, or save it as plain text in UTF-8"
COMPRESSED_CURE = "give it a name that ends as the program spells it: .gz, .bz2, .zst or .xz"
TAR, TAR_MARK = Foreign("a tar archive", "tar -xf FILE -C FOLDER unpacks it; give --docs FOLDER"), slice(257, 262)
SIGNATURES = {
    (b"\xff\xd8\xff", b"\x89PNG", b"GIF8"): Foreign("an image"),
    (b"%PDF-",): Foreign("a PDF", "pdftotext FILE NEW.txt makes a text of it"),
    (b"{\\rtf", b"\xd0\xcf\x11\xe0", b"PK\x03\x04"): Foreign("an Office document or a zip archive", OFFICE_CURE),
    (b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ"): Foreign("a compressed file", COMPRESSED_CURE),
    (b"\xff\xfe\0\0",): _in_encoding("utf-32"),
    (b"\xff\xfe", b"\xfe\xff"): _in_encoding("utf-16"),
}
"""What a file is, by its first bytes."""
PAIRS = rb"(?:[!-~]{2}){1,500}?"
SEVEN_BITS = {
    "iso-2022-jp-2": re.compile(rb"\x1b\$(?:[@AB]|\([CD])%b\x1b" % PAIRS),
    "iso-2022-kr": re.compile(rb"\x1b\$\)C(?s:.{,500}?)\x0e%b\x0f" % PAIRS),
    "iso-2022-cn": re.compile(rb"\x1b\$\)[AEG](?s:.{,500}?)\x0e%b\x0f" % PAIRS),
    "hz": re.compile(rb"~\{%b~\}" % PAIRS),
    "utf-7": re.compile(rb"\+[A-Za-z0-9+/]+-?"),
}
"""How encodings that look like ASCII spell other characters, by their names in iconv; HZ has one in Python alone."""
READ_HZ = """python -c "import sys; print(open(sys.argv[1], encoding='hz').read(), end='')\""""
EAST_ASIAN = ("gb2312", "big5", "euc_jp", "euc_kr")
"""Encodings that give the lower codes to frequent characters."""
BINARY = Foreign("no text but binary data")
JSON_LINES = "import json, sys; [print(json.dumps(record)) for record in json.load(open(sys.argv[1]))]"
A_LIST = Foreign(
    "JSON in lists; each line must be an object with its text in a field",
    f'python -c "{JSON_LINES}" FILE > NEW.jsonl makes JSON lines of one list',
)
WEB_PAGE = Foreign("a web page", "save it as plain text", is_text=True)
HTML = re.compile(rb"[\s\xef\xbb\xbf]*<(?:!doctype html|html)", re.IGNORECASE)  # after byte-order marks
NO_FILE = Foreign("a pipe, a socket or a device", "write what comes out of it into a file")
"""What is never opened, since that may never return."""
MOST_ZEROS = 0.01  # share of a text's bytes; a few are dropped as BERT drops control characters


def not_text(head: bytes) -> Foreign | None:
    """Tells what a file is that cannot be read as text, by its first bytes; None where it can."""
    known = next((kind for starts, kind in SIGNATURES.items() if head.startswith(starts)), None)
    known = TAR if head[TAR_MARK] == b"ustar" else known
    if known or head.count(0) <= MOST_ZEROS * len(head):
        return known or _find_seven_bit_encoding(head)
    zeros = [head[first::2].count(0) for first in (0, 1)]
    if max(zeros) > 0.4 * len(head) and 20 * min(zeros) < max(zeros):
        return _in_encoding("utf-16le" if zeros[1] > zeros[0] else "utf-16be")
    return BINARY


def _find_seven_bit_encoding(head: bytes) -> Foreign | None:
    """Recognizes an encoding that spells other characters in ASCII; None for plain ASCII and all else."""
    found = ((name, run.findall(head)) for name, run in SEVEN_BITS.items() if head.isascii())
    name = next((name for name, runs in found if runs and (name[:3] == "iso" or _fits_encoding(name, head, runs))), "")
    if not name:
        return None
    return _in_encoding(name, READ_HZ) if name == "hz" else _in_encoding(name)


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


def describe_unknown(head: bytes) -> Foreign:
    """Tells what a file is that is text, perhaps, but in no format that is read."""
    if HTML.match(head):
        return WEB_PAGE
    return A_LIST if head.lstrip().startswith(b"[") else Foreign("of no format that is known", is_text=True)
