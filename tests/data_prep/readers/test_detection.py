"""The format of a file is told by its content."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reading import detected, write

from data_prep.common.errors import UserError


@pytest.mark.parametrize("content", [b"\x7fELF\x00\x01\x02\x03", b"\xff\xfea\x00b\x00", b"caf\xe9, latin-1\n" * 9])
def test_a_file_without_a_suffix_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="the format of 1 of 1 files is not known"):
        detected(write(tmp_path / "file", content))


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.txt", "About <mediawiki> and <page> tags.\n", "text"),
        ("wiki_00", '<doc id="1" url="u" title="XML">\nXML\n\nA <page> in <mediawiki>.\n</doc>\n', "wikiextractor"),
        ("a.json", '{"text": "<page> of <mediawiki>"}\n', "jsonl"),
        ("a.jsonl", '\ufeff\n{ "text" : "x"}\n', "jsonl"),
        ("a.xml", "<?xml version='1.0'?>\n<!-- c -->\n<mediawiki>\n", "mediawiki"),
        ("a", "\n <page>\n<title>A</title></page>", "mediawiki"),
    ],
)
def test_the_content_tells_the_format(tmp_path: Path, name: str, content: str, format: str) -> None:
    assert detected(write(tmp_path / name, content)) == format


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,text\n1,word\n"),
        ("a.json", '[{"text": "x"}]'),
        ("a.html", "<html>text</html>"),
        ("a.py", "x = 1\n"),
    ],
)
def test_other_formats_are_not_guessed_at(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(UserError, match=rf"the format of 1 of 1 files is not known, such as .*{name}"):
        detected(write(tmp_path / name, content))
