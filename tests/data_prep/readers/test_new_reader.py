"""A format that a stranger adds is one file: its files are found, named, read, and checked by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.copies import copy_packages, run_entry

READER = '''
"""Cards: records that begin with a line of #, their fields a line each."""
from __future__ import annotations
import re
from pathlib import Path
from data_prep.readers.cutting import ranges, records
from data_prep.readers.foreign import Foreign
from data_prep.readers.formats.declaration import Reader
from data_prep.readers.reader import Document
OLD = Foreign("a pile of old cards", "turn FILE over")
def read(span, options):
    for offset, record in records(span, re.compile(rb"\\n(#)"), options.problems, re.compile(rb"\\n\\Z")):
        text = options.problems.decode(record, span, offset)
        if text is None:
            continue
        fields = dict(line.split(": ", 1) for line in text.split("\\n")[1:] if line)
        if options.text_field not in fields:
            raise options.explain_missing_text(span.name_place(offset), {})
        yield Document(f"{Path(span.path).name}:{offset}", "", [fields[options.text_field]])
READER = Reader(
    read,
    ranges,
    suffixes=(".cards",),
    first_bytes=(b"#card\\n",),
    has_fields=True,
    find_fault=lambda path, head: OLD if b"old: " in head else None,
    describe=lambda path, text_field: ", nicely filed",
)
'''
CARDS = "".join(f"#card\nnumber: {n}\nbody: This is card {n}. It lies in box {n % 7}.\n" for n in range(400))


@pytest.mark.slow
def test_a_reader_is_one_file(tmp_path: Path) -> None:
    root, mine = copy_packages(tmp_path / "copy", data_prep__readers__formats__cards=READER), tmp_path / "mine"
    mine.mkdir()
    for name in ("a.cards", "b.txt", "c.dat"):
        (mine / name).write_text(CARDS)
    (mine / "d.txt").write_text("A book, with\nlines of text.\n\nIt ends.\n")
    small = ("--lengths", "64", "--duplicates", "1", "--workers", "1", "--vocab-size", "300")

    def shard(*words: object, code: int = 0) -> str:
        places = ("--docs", mine, "--out", tmp_path / "out")
        return run_entry(root, "data_prep/shard.py", *places, *small, *words, code=code)

    assert "--text-field mine=FIELD names the field" in shard(code=2)
    assert "there is cards, mediawiki, wikiextractor," in shard("--format", "deck", code=2)
    out = shard("--text-field", "body")
    assert "3 cards (text in 'body'), 1 text, nicely" in out
    assert "all is right" in run_entry(root, "data_prep/verify.py", tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [file["format"] for file in manifest["sources"]] == ["cards", "cards", "cards", "text"]
    assert manifest["corpus"]["documents"] == 1201
    (mine / "e.cards").write_text("#card\nold: 1\n")
    assert "a pile of old cards" in shard("--text-field", "body", code=2)
