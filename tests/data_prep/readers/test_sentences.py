"""One sentence a line, and telling that format from a book."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from support.reading import detected, passages, write

from data_prep.readers import READERS

SAMPLE = """This text has characters such as 力加勝北区 in it.
Each line of it is one sentence, and an empty line parts the documents.
"Is it so?" he asked.

The rain had stopped before the morning came over the hills at Mr. Grey's farm.
Nobody had seen it stop…
It was 5 p.m. when somebody did (or so they said).

An open letter
The third document begins here!
“It ends here.”
"""


def test_the_original_format(tmp_path: Path) -> None:
    path = write(tmp_path / "sample.txt", SAMPLE)
    assert detected(path) == "sentences"
    expected = [part.strip().split("\n") for part in SAMPLE.split("\n\n")]
    for step in (1 << 20, 10):
        assert passages(path, "sentences", step=step) == expected
    assert READERS["sentences"].has_sentences
    lines = SAMPLE.replace("\n", "\r\n").replace("\r\n\r\n", "\r\n  \r\n\r\n")
    crlf = write(tmp_path / "crlf.txt", "\ufeff\r\n" + lines)
    assert detected(crlf) == "sentences"
    assert [lines for lines in passages(crlf, "sentences", step=10) if lines] == expected


def test_line_separators_are_no_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "One\u2028two\x85three\x0cfour.\nFive.\n\n  Six.\n")
    assert passages(path, "sentences") == [["One\u2028two\x85three\x0cfour.", "Five."], ["Six."]]


@pytest.mark.parametrize(
    ("name", "text", "format"),
    [
        ("long.txt", "One sentence is here.\nHere is another one.\n" * 900, "sentences"),  # no end of it in sight
        ("lower.txt", "he was , as usual , there .\n`` was he ? ''\nhe was not .\nthey knew .\n\n" * 20, "sentences"),
        ("chinese.txt", "今天天气很好。\n我们去公园吧！\n\n他来了吗？\n没有来。\n" * 20, "sentences"),
        ("bare", SAMPLE * 3, "sentences"),
        (
            "wrapped.txt",
            "It was the best of times for\nthose who had. It was\nthe worst for\nall the rest.\n\n" * 9,
            "text",
        ),
        ("paragraphs.txt", "It was one. It was two. It was more.\n\nHe came. He went. He came again.\n\n" * 9, "text"),
        ("dialogue.txt", '"Is it?"\n\n"It is."\n\nHe went away.\n\nShe stayed there.\n\n' * 9, "text"),
        ("blocks.txt", "He came. He went.\nHe saw it. It saw him.\nThen it went. So did he.\n\n" * 9, "text"),
        (
            "verse.txt",
            "The sun has set on the sea\nAnd all the birds are still,\nThe night\nfalls on it.\n\n" * 9,
            "text",
        ),
        ("few.txt", "One.\nTwo.\n", "text"),
        ("notes.md", "One sentence is here.\nHere is another one.\n\n" * 9, "text"),
        ("LICENSE", "Anyone may read this\nand do as they like.\n", "text"),
    ],
)
def test_sentences_or_a_book(tmp_path: Path, name: str, text: str, format: str) -> None:
    assert detected(write(tmp_path / name, text)) == format
    assert detected(write(tmp_path / f"{name}.gz", gzip.compress(text.encode()))) == format
