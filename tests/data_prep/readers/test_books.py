"""Plain text and markdown: paragraphs of books, without marks and licences, and files of one sentence a line."""

import gzip
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal
from support.reading import COMPRESS, detected, passages, read, write

from data_prep.readers import cutting
from data_prep.readers.extraction import sample_sources
from data_prep.readers.formats import text as books
from data_prep.readers.formats.declaration import list_readers
from data_prep.readers.sources import find_files
from data_prep.settings import Settings


def book(text: str, name: str = "book.txt") -> list[str]:
    return books.passages(text, name.endswith(".md"), Counter())


def test_a_book_is_one_document_with_its_chapters_in_order(tmp_path: Path) -> None:
    (tmp_path / "Some Author").mkdir()
    text = "\n\n".join(f"CHAPTER {n}\n\nFirst line of {n}\nand its second.\n\nMore of {n}." for n in "1234")
    path = write(tmp_path / "Some Author" / "Its Title.txt", text)
    assert detected(path) == "text"
    (document,) = read(path, "text", step=10)[0]
    assert (document.id, document.title) == ("Some Author/Its Title.txt", "Its Title")
    assert document.passages == text.replace("\nand", " and").split("\n\n")
    packed = write(tmp_path / "Some Author" / "Its Title.txt.gz", gzip.compress(text.encode()))
    assert read(packed, "text")[0][0].title == "Its Title"


def test_line_ends_byte_order_marks_and_books_of_hardly_a_word(tmp_path: Path) -> None:
    text = "\ufeffOne line\nand another.\n \t\nNew paragraph.\n\n\n\nLast.\n"
    lines = ["One line and another.", "New paragraph.", "Last."]
    texts = {text.replace("\n", end): lines for end in ("\r\n", "\r", "\n")}
    texts |= {" \n\n": [], "Word": ["Word"], "A\x00B \x00": ["A\x00B \x00"]}
    for number, (content, expected) in enumerate(texts.items()):
        assert passages(write(tmp_path / f"{number}.txt", content), "text") == [expected]


GUTENBERG_HEAD = "The Project Gutenberg EBook of X, by Y\n\nThis eBook is for anyone anywhere.\n\nTitle: X\n\n"
LICENCE = "\n\nUpdated editions will replace the previous one.\n\nSection 1. General Terms of Use\n"
START, END = "*** START OF THE PROJECT GUTENBERG EBOOK X ***", "*** END OF THE PROJECT GUTENBERG EBOOK X ***"
STARTS = [START, START.replace("THE", "THIS"), START.replace(" S", "S").replace("X ", "X")]
STARTS += [START.replace(" X", " A VERY LONG TITLE\nOF TWO LINES"), START.replace("X ***", "WITHOUT STARS")]
STARTS += [f"{START}\n\nProduced by Some One and Another\nOne at www.x.org", f"{START}\n\n\n\n\nE-text prepared by A"]
STARTS += ["*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*"]
ENDS = [END, END.replace("THE", "THIS"), END.replace(" E", "E", 1).replace("X ", "X")]
ENDS += ["End of Project Gutenberg's X, by Y", "End of The Project Gutenberg Etext of X"]
ENDS += [f"End of the Project Gutenberg EBook of X, by Y\n\n{END}"]


@pytest.mark.parametrize("start", STARTS)
def test_gutenberg_header_and_licence(start: str) -> None:
    for end in ENDS:
        text = f"{GUTENBERG_HEAD}{start}\n\n\nIt was a dark\nnight.\n\nThe _end_ came.\n\n\n{end}{LICENCE}"
        for given_text in (text, text.replace("\n", "\r\n")):
            assert book(given_text) == ["It was a dark night.", "The end came."], end


def test_gutenberg_books_may_follow_each_other() -> None:
    one = f"{GUTENBERG_HEAD}{START}\n\nText %d.\n\n"
    text = "".join(f"{one % number}{END}{LICENCE}\n" for number in range(3)) + one % 3
    assert book(text) == [f"Text {number}." for number in range(4)]


SMALL_PRINT = "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*END*"
PROSE = ["Intro.\n\nEnd of Project Gutenberg is not near.", "He read of Project Gutenberg, and *** START OF IT."]
MISSING = {
    "Text.\n\nEnd of Project Gutenberg's X\n\nLicence.": ["Text."],
    f"Header.\n\n{START}\n\nText.\n\nMore.": ["Text.", "More."],
    f"Text.\n\nEnd of Project Gutenberg's X\n\nLicence.\n\n{SMALL_PRINT}\n": ["Text."],
    **{text: text.split("\n\n") for text in PROSE},
}


@pytest.mark.parametrize(("text", "expected"), MISSING.items())
def test_gutenberg_marks_may_be_missing(text: str, expected: list[str]) -> None:
    assert book(text) == expected


MARKDOWN = {
    "---\ntitle: A Book\nauthor: A\n---\n# A Book #\n\nA *Subtitle*\n=====\n\n## Chapter\nText.": ["Text."],
    "It was a **dark**, _very **stormy**_ night: ***so*** dark.": ["It was a dark, very stormy night: so dark."],
    "It was _aw_fully\ncold; 2 * 3 * 4 = 24, snake_case.": ["It was awfully cold; 2 * 3 * 4 = 24, snake_case."],
    'With [a link](http://x.org/a_(b) "A title"), <b>HTML</b> &amp; an ![image](y.png).': ["With a link, HTML & an ."],
    "![Only an image](z.png)\n-------\n\n* * *\n\n> A quotation\n> of two lines.": ["A quotation of two lines."],
    "- first item\n- second item,\n  of two lines\n* third": ["first item", "second item, of two lines", "third"],
    "1. one\n2. two\n\nIn the year\n1999. It was so.": ["one", "two", "In the year 1999. It was so."],
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('no text')\n```\n\nAnother Heading\n---": [],
    "Dated 1875\\. The \\*end\\*.\n[1]: http://x.org/where\n***\n#\n": ["Dated 1875. The *end*."],
}


def test_markdown() -> None:
    for text, expected in MARKDOWN.items():
        assert book(text, "book.md") == expected
    assert book("\n\n".join(MARKDOWN), "book.md") == [line for lines in MARKDOWN.values() for line in lines]


@pytest.mark.parametrize("before", ["", "\n\n", f"{GUTENBERG_HEAD}{START}\n\n"])
def test_the_first_line_is_read_as_others_are(before: str) -> None:
    starts = ["# Heading\n", "Heading\n===\n", "---\n", "| a | b |\n", "[1]: http://x.org\n", "***\n\n- "]
    for start in (*starts, "- ", "1. ", "> "):
        assert book(f"{before}{start}Text.", "book.md") == ["Text."], start


def test_what_only_looks_like_markdown_stays() -> None:
    texts = ["[Aside.] He goes. [Exit] [Pause]", "It is #1, and C# too.", "Five _ and * alone."]
    texts += ["A fence that is not closed:\n```\nand the rest.", "Where ye shall never win.'\nAnd again.\n---"]
    for text in texts:
        assert book(text, "book.md") == [" ".join(text.removesuffix("\n---").split("\n"))]


@given(st.text(alphabet="a *_[]()!#-=`~>|\\\n1.&;<", max_size=300))
@settings(max_examples=200)
def test_any_markdown_gives_lines_with_their_words(text: str) -> None:
    for line in book(text, "book.md") + book(text):
        assert line
        assert line == line.strip().replace("\n", "")


def test_hostile_markdown_takes_no_longer_for_being_long() -> None:
    for unit in ("*a ", "_a ", "[", "![", "[](", "[](a ", "](", "**", "```\n", "~~~\n", "> ", "\n- ", "|", "- "):
        start = time.process_time()
        book(unit * (200_000 // len(unit)), "book.md")
        assert time.process_time() - start < 5, unit  # seconds; minutes, were it quadratic


def test_a_book_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "LARGEST_DOCUMENT", 1 << 20)
    said = r"x.txt: one document of more than 1 MB\ncut it up, or .*--format sentences"
    assert_refusal(said, read, write(tmp_path / "x.txt", "word " * 300_000), "text")


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
    assert list_readers()["sentences"].has_sentences
    lines = SAMPLE.replace("\n", "\r\n").replace("\r\n\r\n", "\r\n  \r\n\r\n")
    crlf = write(tmp_path / "crlf.txt", "\ufeff\r\n" + lines)
    assert detected(crlf) == "sentences"
    assert [lines for lines in passages(crlf, "sentences", step=10) if lines] == expected


def test_line_separators_are_no_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "One\u2028two\x85three\x0cfour.\nFive.\n\n  Six.\n")
    assert passages(path, "sentences") == [["One\u2028two\x85three\x0cfour.", "Five."], ["Six."]]


LOOKS = [
    ("long.txt", "One sentence is here.\nHere is another one.\n" * 900, "sentences"),  # no end of it in sight
    ("lower.txt", "he was , as usual , there .\n`` was he ? ''\nhe was not .\nthey knew .\n\n" * 20, "sentences"),
    ("chinese.txt", "今天天气很好。\n我们去公园吧！\n\n他来了吗？\n没有来。\n" * 20, "sentences"),
    ("bare", SAMPLE * 3, "sentences"),
    ("wrapped.txt", "It was the best for\nthose who had. It was\nthe worst for\nall the rest.\n\n" * 9, "text"),
    ("paragraphs.txt", "It was one. It was two. It was more.\n\nHe came. He went. He came again.\n\n" * 9, "text"),
    ("dialogue.txt", '"Is it?"\n\n"It is."\n\nHe went away.\n\nShe stayed there.\n\n' * 9, "text"),
    ("blocks.txt", "He came. He went.\nHe saw it. It saw him.\nThen it went. So did he.\n\n" * 9, "text"),
    ("verse.txt", "The sun set on the sea\nAnd all birds are still,\nThe night\nfalls on it.\n\n" * 9, "text"),
    ("few.txt", "One.\nTwo.\n", "text"),
    ("notes.md", "One sentence is here.\nHere is another one.\n\n" * 9, "text"),
    ("LICENSE", "Anyone may read this\nand do as they like.\n", "text"),
]


@pytest.mark.parametrize(("name", "text", "format"), LOOKS, ids=[name for name, _, _ in LOOKS])
def test_sentences_or_a_book(tmp_path: Path, name: str, text: str, format: str) -> None:
    assert detected(write(tmp_path / name, text)) == format
    assert detected(write(tmp_path / f"{name}.gz", gzip.compress(text.encode()))) == format


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_sample_of_a_long_text_is_its_beginning(suffix: str, tmp_path: Path) -> None:
    data = "Ein Satz, nämlich dieser hier.\n\n" * 300_000
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](data.encode()))
    before = psutil.Process().io_counters().read_chars
    ((_, sample),) = sample_sources(find_files([str(path)]), Settings(), ())
    assert 500_000 < len(sample) < 600_000
    assert data.replace("\n\n", " ").startswith(sample)
    assert psutil.Process().io_counters().read_chars - before < 8_000_000
