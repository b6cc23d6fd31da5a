"""The format of a file is told by its content."""

from __future__ import annotations

import base64
import gzip
import json
import random
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
from support.commands import assert_refusal
from support.reading import detected, passages, write

from data_prep.common.errors import UserError
from data_prep.readers.foreign import not_text
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files

JPEG, LATIN_1 = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00", b"caf\xe9, latin-1\n" * 9
GERMAN = "Grüße aus Köln.\n\nEs regnet, z. B. heute.\n" * 9


@pytest.mark.parametrize("name", ["file", "file.txt"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\x00\x01\x02\x03", "no text but binary data"),
        (JPEG, "an image"),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF\n    pdftotext {path} NEW.txt makes a text of it"),
        (b"PK\x03\x04\x14", "an Office document or a zip archive\n    unpack it, or save it as plain text in UTF-8"),
        (
            gzip.compress(GERMAN.encode(), mtime=0),
            "a compressed file\n    give it a name that ends as the program spells it",
        ),
        (GERMAN.encode("utf-16"), "text in UTF-16\n    iconv -f utf-16 -t utf-8 {path} > NEW.txt makes UTF-8 of it"),
        (GERMAN.encode("utf-16-le"), "text in UTF-16LE\n    iconv -f utf-16le -t utf-8 {path} > NEW.txt makes"),
        (GERMAN.encode("utf-16-be"), "text in UTF-16BE\n    iconv -f utf-16be -t utf-8 {path} > NEW.txt makes"),
    ],
    ids="binary jpeg pdf zip gzip utf-16 utf-16-le utf-16-be".split(),
)
def test_a_file_that_is_no_text_whatever_its_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = write(tmp_path / name, content)
    for formats in ({}, {"": "text"}):
        with pytest.raises(UserError) as caught:
            find_files([str(path)], formats)
        start = f"--docs {path}: 1 of 1 files cannot be read\n  {path}: {message.format(path=path)}"
        assert str(caught.value).startswith(start)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_tar_archives_are_to_be_unpacked(tmp_path: Path, mode: Literal["w", "w:gz"]) -> None:
    path = tmp_path / ("a.tar.gz" if "gz" in mode else "a.tar")
    with tarfile.open(path, mode) as archive:
        archive.add(write(tmp_path / "a.txt", "Text.\n" * 99), "a.txt")
    assert_refusal(rf"{path}: a tar archive\n    tar -xf {path} -C FOLDER unpacks it", detected, path)


UMLAUTS, QUOTES = "Grüße aus Köln! Schöne Äpfel, für Ärzte.\n" * 4, "“It’s”, he said – so…\n$5 & 1+1 “is” <b>\n" * 4
RUSSIAN, KOREAN = "Мы живём в этом городе.\n" * 9, "우리는 이 도시에 산다.\n그것은 크고 오래되었다.\n" * 9
JAPANESE = "私たちはこの町に住んでいる。\n大きくて古い町だ。\nWuhanの近く。\n" * 9
CHINESE = "我们住在这个城市里, near Wuhan.\n很大，很老。\n离河不远。\n" * 9
IN_GB = CHINESE.encode("hz").replace(b"~{", b"\x0e").replace(b"~}", b"\x0f")
SEVEN_BITS = [
    ("iso-2022-jp-2", JAPANESE, JAPANESE.encode("iso2022_jp")),
    ("iso-2022-kr", KOREAN, KOREAN.encode("iso2022_kr")),
    ("iso-2022-cn", CHINESE, b"\x1b$)A" + IN_GB),
    ("hz", CHINESE, CHINESE.encode("hz")),
    *(("utf-7", text, text.encode("utf-7")) for text in (UMLAUTS, QUOTES, RUSSIAN, JAPANESE, CHINESE, KOREAN)),
]


@pytest.mark.parametrize(("encoding", "text", "content"), SEVEN_BITS)
@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_text_in_a_seven_bit_encoding_is_refused_with_a_cure_that_works(
    tmp_path: Path, encoding: str, text: str, content: bytes, name: str
) -> None:
    """Also if the examined beginning of the file ends inside a character."""
    path = write(tmp_path / name, content)
    message = rf"  {path}: text in {encoding.upper()}\n    (.*) > NEW.txt makes UTF-8 of it"
    for formats in ({}, {"": "text"}):
        with pytest.raises(UserError, match=message) as caught:
            find_files([str(path)], formats)
    cure = str(caught.value).split("\n")[2].partition(" makes ")[0].strip()
    subprocess.run(cure.replace("python", sys.executable, 1), shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "NEW.txt").read_text() == text
    assert detected(tmp_path / "NEW.txt") in ("text", "sentences")
    write(tmp_path / "plain.txt", GERMAN)
    problems = Problems("skip")
    assert [file.name for file in find_files([str(tmp_path / "plain.txt"), str(path)], {}, None, problems)] == [
        "plain.txt"
    ]
    assert problems.skipped == [f"{path}: text in {encoding.upper()}"]
    for end in range(len(content) * 99, len(content) * 99 + 16):
        assert not_text((content * 100)[:end])


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
    for _ in range(3000):
        line = draw.choice(kinds)
        content = "\n".join(line() for _ in range(draw.randint(1, 60))).encode()
        assert not_text(content) is None, content


NO_PAGES = ["Of tags:\n<html>", "<htm>", "<p>", "<!doctype book>"]
LINES = [{"text": "Grüße."}, {"text": "Two.", "more": {"n": 1}}]
OBJECTS = "\n".join(json.dumps(line, indent=2) for line in LINES).encode()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", GERMAN.encode("utf-16"), "text in UTF-16"),
        ("a.json", json.dumps(LINES, indent=1).encode(), "JSON in lists"),
        *((name, OBJECTS, "JSON whose objects go over several lines") for name in ("a.json", "a.txt", "a.jsonl")),
    ],
)
def test_a_cure_cures(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=fault) as caught:
        detected(path)
    cure = str(caught.value).split("\n")[2].partition(" makes ")[0].strip()
    if cure.startswith("jq") and shutil.which("jq") is None:
        pytest.skip("needs jq")
    subprocess.run(cure.replace("python", sys.executable, 1), shell=True, check=True, cwd=tmp_path)
    (cured,) = tmp_path.glob("NEW.*")
    if cured.suffix == ".txt":
        assert cured.read_text() == GERMAN
    else:
        assert passages(cured, "jsonl") == [["Grüße."], ["Two."]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_only_the_head_of_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    data = random.Random(1).randbytes(3 << 20).hex().encode()
    path = write(tmp_path / f"a.txt{suffix}", gzip.compress(data) if suffix else data)
    detected(path)
    before = psutil.Process().io_counters().read_chars
    detected(path)
    assert psutil.Process().io_counters().read_chars - before < 200_000


def test_a_file_without_a_suffix_that_is_not_utf8_and_damaged_json_lines(tmp_path: Path) -> None:
    assert_refusal(f"{tmp_path}/file: of no format that is known", detected, write(tmp_path / "file", LATIN_1))
    for content in ('{"text": oops}\n', '{"text": oops}\n{"text": "x"}\n', '{"text": "x"}\noops\n', '{"text": "x'):
        assert detected(write(tmp_path / "a.jsonl", content)) == "jsonl"


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


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.json", '[{"text": "x"}]', "JSON in lists"),
        ("a.jsonl", '["x"]\n["y"]\n', "JSON in lists"),
        ("a.html", "<html>text</html>", "a web page"),
        ("a.py", "x = 1\n", "of no format that is known"),
    ],
)
def test_other_formats_are_not_guessed_at(tmp_path: Path, name: str, content: str, what: str) -> None:
    assert_refusal(rf"1 of 1 files cannot be read\n  .*{name}: {what}", detected, write(tmp_path / name, content))
