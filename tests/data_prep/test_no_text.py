"""What formats leave out as no text is counted: by shard.py at its end, in the manifest, in its page, with --from."""

import re
from pathlib import Path

import pytest
from support.commands import run_main
from support.reading import page, read, wiki_dump, write
from support.shards import SHORT, make, tell

from data_prep import show, verify
from data_prep.shards import MANIFEST, Manifest

CODE = "# The log of a run\n\n| time | who |\n\n> It says so.\n\nAnd so it was. "


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a dump, markdown and plain text, of which a known number of things is no text."""
    folder = tmp_path / "texts"
    (folder / "_old" / "deep").mkdir(parents=True)
    prose = "It was a long day for all of them. They went home in the evening. "
    pages = [
        *(page(f"A{n}", f"{prose * 9}\n* an item\n# another\n\n: an aside", n) for n in range(3)),
        *(page(f"R{n}", "#REDIRECT [[A]]", n) for n in range(4)),
        *(page(f"D{n} (disambiguation)", "* a planet", n) for n in range(5)),
        *(page(f"Talk:{n}", "Chatter.", n, namespace=1) for n in range(6)),
    ]
    write(folder / "dump.xml", wiki_dump(*pages))
    write(
        folder / "a.md",
        f"---\ntitle: A\n---\n\nTop\n===\n\n# Head\n\nNext\n---\n\n{prose * 9}\n\n| a | b |\n\n```\ncode\n```\n",
    )
    write(folder / "b.txt", CODE + prose * 9)
    for hidden in ("_SUCCESS", "_old/deep/x.txt", ".hidden.txt"):
        write(folder / hidden, prose)
    return folder


EXPECTED = {
    "mediawiki: disambiguation pages": 5,
    "mediawiki: list items": 9,
    "mediawiki: pages outside the main namespace": 6,
    "mediawiki: redirects": 4,
    "text: blocks of code": 1,
    "text: front matter": 1,
    "text: headings, rows of tables and targets of links": 4,
    "files and folders whose names begin with _": 2,
}


def test_what_is_no_text_is_counted_and_told(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = tell(out, "--docs", texts, *SHORT)
    assert Manifest.read(out).corpus.no_text == EXPECTED
    run_main(show.main, out, "--report")
    report = (out / "report.html").read_text()
    for what, count in EXPECTED.items():
        assert re.search(rf"no text +{count} +{what}", said)
        assert what in report
    run_main(verify.main, out)


def test_text_beside_other_documents_counts_its_own(texts: Path, tmp_path: Path) -> None:
    first = make(tmp_path / "first", "--docs", texts, *SHORT)
    alone = make(tmp_path / "alone", "--from", first, *SHORT[:4])
    write(tmp_path / "more.md", f"# One\n# Two\n{'Some more text of another kind is here. ' * 30}")
    both = make(tmp_path / "both", "--from", alone, "--docs", tmp_path / "more.md", *SHORT[:4])
    lines = "text: headings, rows of tables and targets of links"
    assert Manifest.read(alone).corpus.no_text == EXPECTED
    assert Manifest.read(both).corpus.no_text == EXPECTED | {lines: EXPECTED[lines] + 2}
    again = make(tmp_path / "again", "--from", both, *SHORT[:4])
    assert Manifest.read(again).corpus.no_text == Manifest.read(both).corpus.no_text


def test_the_counts_change_no_fingerprint(texts: Path, tmp_path: Path) -> None:
    first = make(tmp_path / "first", "--docs", texts, *SHORT)
    write(texts / "_more", "Nothing.")
    second = make(tmp_path / "second", "--docs", texts, *SHORT)
    assert Manifest.read(first).fingerprint == Manifest.read(second).fingerprint
    assert (first / MANIFEST).read_bytes() != (second / MANIFEST).read_bytes()


def test_lines_of_logs_and_chats_stay_in_plain_text(tmp_path: Path) -> None:
    chat = "# join us\n\n| ana | hello there |\n\n> so it is\n\n```\nx = 1  # one\n```"
    (tmp_path / "a").mkdir()
    path = write(tmp_path / "a" / "chat.txt", chat)
    [document], problems = read(path, "text")
    assert document.passages == ["# join us", "| ana | hello there |", "> so it is", "``` x = 1  # one ```"]
    assert not problems.no_text
    [document], problems = read(write(tmp_path / "a" / "chat.md", chat), "text")
    assert document.passages == ["so it is"]
    assert problems.no_text.total() == 3
