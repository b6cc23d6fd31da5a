"""The format of a file is told by its content."""

import base64
import gzip
import json
import random
import re
import shutil
import string
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest
from support.commands import assert_refusal, refusal
from support.reading import COMPRESS, detected, passages, write

from data_prep.readers.foreign import not_text
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files

GERMAN = "Grüße aus Köln.\n\nEs regnet, z. B. heute.\n" * 9


BINARY = [
    ("no text but binary data", b"\x7fELF\x00\x01\x02\x03"),
    ("an image", b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"),
    ("a PDF\n    pdftotext {path} NEW.txt makes a text of it", b"%PDF-1.7\n%\xe2\xe3"),
    ("an Office document or a zip archive\n    unpack it, or save it as plain text in UTF-8", b"PK\x03\x04\x14"),
    ("a compressed file\n    give it a name that ends as the program spells it", gzip.compress(GERMAN.encode())),
]


@pytest.mark.parametrize("name", ["file", "file.txt"])
@pytest.mark.parametrize(("message", "content"), BINARY, ids=[message.split("\n")[0] for message, _ in BINARY])
def test_a_file_that_is_no_text_whatever_its_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    for formats in ({}, {"": "text"}):
        said = refusal(find_files, [str(path)], formats)
        assert said.startswith(f"--docs {path}: 1 of 1 files cannot be read\n  {path}: {message.format(path=path)}")


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz")])
def test_tar_archives_are_to_be_unpacked(tmp_path: Path, name: str, mode: Literal["w", "w:gz"]) -> None:
    with tarfile.open(tmp_path / name, mode) as archive:
        archive.add(write(tmp_path / "a.txt", "Text.\n" * 99), "a.txt")
    message = rf"{name}: a tar archive\n    tar -xf {tmp_path / name} -C FOLDER unpacks it"
    assert_refusal(message, detected, tmp_path / name)


def cure(said: str, folder: Path) -> Path:
    """Does what the message says; returns the new file."""
    command = said.split("\n")[2].partition(" makes ")[0].strip()
    if command.startswith("jq") and shutil.which("jq") is None:
        pytest.skip("needs jq")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, cwd=folder)
    (cured,) = folder.glob("NEW.*")
    return cured


UMLAUTS, QUOTES = "Grüße aus Köln! Schöne Äpfel, für Ärzte.\n" * 4, "“It’s”, he said – so…\n$5 & 1+1 “is” <b>\n" * 4
RUSSIAN, KOREAN = "Мы живём в этом городе.\n" * 9, "우리는 이 도시에 산다.\n그것은 크고 오래되었다.\n" * 9
JAPANESE = "私たちはこの町に住んでいる。\n大きくて古い町だ。\nWuhanの近く。\n" * 9
CHINESE = "我们住在这个城市里, near Wuhan.\n很大，很老。\n离河不远。\n" * 9
IN_GB = CHINESE.encode("hz").replace(b"~{", b"\x0e").replace(b"~}", b"\x0f")
UTF_16 = {"utf-16": "utf-16", "utf-16le": "utf-16-le", "utf-16be": "utf-16-be"}
ENCODED = [
    ("iso-2022-jp-2", JAPANESE, JAPANESE.encode("iso2022_jp")),
    ("iso-2022-kr", KOREAN, KOREAN.encode("iso2022_kr")),
    ("iso-2022-cn", CHINESE, b"\x1b$)A" + IN_GB),
    ("hz", CHINESE, CHINESE.encode("hz")),
    *((name, GERMAN, GERMAN.encode(codec)) for name, codec in UTF_16.items()),
    *(("utf-7", text, text.encode("utf-7")) for text in (UMLAUTS, QUOTES, RUSSIAN, JAPANESE, CHINESE, KOREAN)),
]


@pytest.mark.parametrize(("encoding", "text", "content"), ENCODED)
def test_another_encoding_is_refused_with_a_cure(tmp_path: Path, encoding: str, text: str, content: bytes) -> None:
    """Also if the examined beginning of the file ends inside a character."""
    for name in ("a", "a.txt"):
        path, fault = write(tmp_path / name, content), f"{tmp_path / name}: text in {encoding.upper()}"
        for formats in ({}, {"": "text"}):
            said = refusal(find_files, [str(path)], formats)
            assert re.search(rf"  {fault}\n    (.*) > NEW.txt makes UTF-8 of it", said)
    cured = cure(said, tmp_path)
    assert cured.read_text() == text
    assert detected(cured) in ("text", "sentences")
    problems = Problems("skip")
    assert [file.path for file in find_files([str(cured), str(path)], {}, None, problems)] == [str(cured)]
    assert problems.skipped == [fault]
    assert all(not_text((content * 3)[:-end]) for end in range(1, 17))


PLAIN = [
    "x = [~{a: 1}, ~{b, c~}] + f(~{ab~}) ~~ 2",
    "In HZ, ~{<:Ky2;#,NpJ)l6HK!#~} is a sentence of Confucius, and UTF-7 has +Zeg- for a sun.",
    "Call +1 415 555 2678, +49 221 12345678 or +14155552678: 1+1=2, a+b, C++, 2+x-3.",
    "To user+tag@example.com, user+bug@example.com, me+dog@example.com, me+API-x@example.com.",
    "\x1b[1mbold\x1b[0m and \x1b(B\x1b[m, as a terminal has it, costs $5",
    r"Figure~{\ref{a}} shows $a~{+}~b$ from \cite{x+absolute-y} and home ~/x.",
    "\x1b$5 + x+abc-1, +1",
    "total = base+someIdentifierOf24Letters",
    "Jan+Feb, Nov+Dec, Jun+Aug, API+CDs-, Q+A.",
]


@pytest.mark.parametrize("plain", PLAIN)
def test_plain_text_that_looks_a_little_like_such_an_encoding_is_read(plain: str) -> None:
    assert not_text(plain.encode()) is None
    assert not_text((plain + "\n").encode() * 99) is None


def test_no_random_text_is_taken_for_another_encoding() -> None:
    """Source code, formulas, addresses with a plus, keys in base64 and any characters of ASCII."""
    draw = random.Random(1)

    def word(most: int = 24) -> str:
        return "".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(1, most)))

    kinds: list[Callable[[], str]] = [
        lambda: "".join(draw.choices(string.printable, k=40)),
        lambda: f"{word()}+{word(9)}@{word()}.com",
        lambda: f"{word()} {draw.choice(['+', '~{', '~}', '+=', '~', '+-'])} {word()}",
        lambda: f"{word()}{draw.choice('+-*/')}{word()}",
        lambda: f"{word()} ~{{{word()}~}}",
        lambda: f"+{draw.randint(10**9, 10**13)}",
        lambda: base64.b64encode(draw.randbytes(57)).decode(),
    ]
    for _ in range(1000):
        line = draw.choice(kinds)
        content = "\n".join(line() for _ in range(draw.randint(1, 60))).encode()
        assert not_text(content) is None, content


DAMAGED = ['{"text": oops}\n', '{"text": oops}\n{"text": "x"}\n', '{"text": "x"}\noops\n', '{"text": "x']
NO_PAGES = ["Of tags:\n<html>", "<htm>", "<p>", "<!doctype book>"]
LINES = [{"text": "Grüße."}, {"text": "Two.", "more": {"n": 1}}]
OBJECTS = "\n".join(json.dumps(line, indent=2) for line in LINES).encode()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", json.dumps(LINES, indent=1).encode(), "JSON in lists"),
        *((name, OBJECTS, "JSON whose objects go over several lines") for name in ("a.json", "a.txt", "a.jsonl")),
    ],
)
def test_a_cure_of_json_cures(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    said = refusal(detected, write(tmp_path / name, content))
    assert fault in said
    assert passages(cure(said, tmp_path), "jsonl") == [["Grüße."], ["Two."]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_only_the_head_of_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    data = random.Random(1).randbytes(1 << 19).hex().encode()
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](data))
    detected(path)
    before = psutil.Process().io_counters().read_chars
    detected(path)
    assert psutil.Process().io_counters().read_chars - before < 200_000


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.txt", "About <mediawiki> and <page> tags.\n", "text"),
        ("wiki_00", '<doc id="1" url="u" title="XML">\nXML\n\nA <page> in <mediawiki>.\n</doc>\n', "wikiextractor"),
        ("a.json", '{"text": "<page> of <mediawiki>"}\n', "jsonl"),
        ("a.jsonl", '\ufeff\n{ "text" : "x"}\n', "jsonl"),
        ("a.xml", "<?xml version='1.0'?>\n<!-- c -->\n<mediawiki>\n", "mediawiki"),
        ("a", "\n <page>\n<title>A</title></page>", "mediawiki"),
        ("a.txt", "A book, in\nlines.\n\n" * 50 + "\0", "text"),
        *(("a.jsonl", line, "jsonl") for line in DAMAGED),
        *(("a.txt", f"{start}\n\nThis is text, of\ntwo lines.\n", "text") for start in NO_PAGES),
    ],
)
def test_the_content_tells_the_format(tmp_path: Path, name: str, content: str, format: str) -> None:
    assert detected(write(tmp_path / name, content)) == format


@pytest.mark.parametrize("name", ["a.txt", "page", "a.txt.gz"])
@pytest.mark.parametrize("start", ["<!doctype html>", "\ufeff\n \ufeff<!DOCTYPE HTML>", "\n\n<Html lang='de'>"])
def test_a_web_page_is_told_by_its_content_and_read_if_asked_for(tmp_path: Path, name: str, start: str) -> None:
    content = f"{start}\n<script>let x, y;</script>\n<p>Text, and more.</p>\n".encode()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert_refusal(rf"  {path}: a web page\n    save it as plain text", detected, path)
    assert [file.format for file in find_files([str(path)], {"": "text"})] == ["text"]


UNKNOWN = [
    ("a.json", b'[{"text": "x"}]', "JSON in lists"),
    ("a.jsonl", b'["x"]\n["y"]\n', "JSON in lists"),
    ("a.html", b"<html>text</html>", "a web page"),
    ("a.py", b"x = 1\n", "of no format that is known"),
    ("file", b"caf\xe9, latin-1\n" * 9, "of no format that is known"),
    ("a.txt.gz", b"no archive", "truncated or damaged .gz, or not compressed at all\n    fetch or pack it anew"),
]


@pytest.mark.parametrize(("name", "content", "what"), UNKNOWN)
def test_other_formats_are_not_guessed_at(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    assert_refusal(rf"1 of 1 files cannot be read\n  .*{name}: {what}", detected, write(tmp_path / name, content))
