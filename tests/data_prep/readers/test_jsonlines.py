"""JSON lines: texts, names, and what is said of lines that have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reading import COMPRESS, detected, passages, read, write

from data_prep.common.errors import UserError
from data_prep.readers.reader import Document


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        '{"text": "One.\\n\\n Two. \\r\\nThree.", "id": 7, "title": "T"}',
        "",
        '{"text": null}',
        '{"text": "", "_id": "x"}',
        '  {"text": "word", "docid": 1.5, "title": null}  ',
        '{"text": "a\\u0000b \\ud83d\\ude00", "id": null}',
        '{"text": "no end of line"}',
    ]
    text = "\n".join(lines)
    for name, data in (("x.jsonl", text), ("crlf.jsonl", text.replace("\n", "\r\n")), ("mark.jsonl", "\ufeff" + text)):
        path = write(tmp_path / name, data)
        for step in (1 << 20, 5):
            documents, _ = read(path, "jsonl", step=step)
            texts = [["One.", "Two.", "Three."], [], [], ["word"], ["a\x00b 😀"], ["no end of line"]]
            assert [document.passages for document in documents] == texts
            assert [document.id for document in documents][0::2] == ["7", "x", documents[4].id]
            assert documents[3].id == "1.5"
            assert documents[1].id == f"{name}:{path.read_bytes().index(lines[2].encode())}"
            assert [document.title for document in documents] == ["T", "", "", "", "", ""]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_json_lines_in_another_field_and_packed(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b'{"content": "One."}\n{"content": "Two."}\n'))
    assert detected(path) == "jsonl"
    assert passages(path, "jsonl", text_field="content") == [["One."], ["Two."]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', "no field 'text'; there is: body, id\n--text-field NAME=body names the field"),
        ("{}", "no field 'text'; there is: none\n"),
        ('["x"]', "a JSON list; each line must be an object with a field 'text'\n"),
        ("3", "a JSON int; each line must be an object"),
        ('{"text": 5}', "the field 'text' is a int, not a text\n"),
        ('{"text": ["x"]}', "the field 'text' is a list, not a text\n"),
        ('{"text": "x"', "not a JSON object on one line: Expecting ',' delimiter"),
        ("{", "not a JSON object on one line: "),
        ("[" * 100_000, "not a JSON object on one line: "),
        ('{"text": "x", "id": ' + "9" * 5000 + "}", "not a JSON object on one line: "),
        ('{"text": "half \\ud800"}', "half a surrogate pair (U+D800)\n--errors replace writes '?'; --errors skip"),
        ('{"text": "x", "title": "\\udc00"}', "half a surrogate pair (U+DC00)\n"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "x.jsonl", f'{{"text": "good"}}\n{line}\n{{"text": "fine"}}\n')
    with pytest.raises(UserError) as caught:
        read(path, "jsonl")
    assert str(caught.value).startswith(f"{path}: line 2: {message}")
    assert str(caught.value).endswith("--errors skip leaves the document out and lists it")
    documents, problems = read(path, "jsonl", "skip", step=20)  # of spans in which the line is not the second
    assert [document.passages for document in documents] == [["good"], ["fine"]]
    assert len(problems.skipped) == 1
    assert problems.skipped[0].startswith(f"{path}: line 2: {message.partition(chr(10))[0]}")


def test_lone_surrogates_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "half \\ud800 of it", "title": "\\udc00", "id": "\\ud801"}\n')
    (document,), problems = read(path, "jsonl", "replace")
    assert document == Document("?", "?", ["half ? of it"])
    assert problems.num_replaced == 2
