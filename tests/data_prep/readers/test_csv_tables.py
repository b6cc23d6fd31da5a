"""Tables as CSV and TSV: texts, names, and what is said of what is no row."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.reading import COMPRESS, detected, passages, read, write

from data_prep.common.errors import UserError


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("part", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_with_line_breaks_in_fields(tmp_path: Path, suffix: str, part: str, end: str) -> None:
    lines = ["id,title,body", '7,T,"One, ""two"".', "", 'Three; here."', "", "8,,Four.", '9,"A, B",Fünf']
    data = "\ufeff" + end.join(line.replace(",", part) if '"' not in line else line for line in lines)
    data = data.replace('7,T,"', f'7{part}T{part}"').replace('9,"A, B",', f'9{part}"A, B"{part}')
    path = write(tmp_path / f"a.csv{suffix}", COMPRESS[suffix](data.encode()))
    assert detected(path) == "csv"
    documents, _ = read(path, "csv", text_field="body")
    assert [document.passages for document in documents] == [['One, "two".', "Three; here."], ["Four."], ["Fünf"]]
    assert [(document.id, document.title) for document in documents] == [("7", "T"), ("8", ""), ("9", "A, B")]


def test_tsv_has_no_quoting_but_of_whole_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'text\tn\n6" wide, "so"\t1\n"He said ""x""."\t2\n"Yes" and "no"\t3\n')
    assert detected(path) == "csv"
    assert passages(path, "csv") == [['6" wide, "so"'], ['He said "x".'], ['"Yes" and "no"']]


@pytest.mark.parametrize(
    ("row", "word"),
    [(b"a,b,c", "3 fields"), (b'"a"b,c', "expected"), (b"caf\xe9,b", "not UTF-8"), (b"only", "1 fields")],
)
def test_what_is_no_row_is_named_by_its_line_and_can_be_left_out(tmp_path: Path, row: bytes, word: str) -> None:
    path = write(tmp_path / "a.csv", b'text,n\n"Good\none.",1\n' + row + b"\nFine.,2\n")
    with pytest.raises(UserError, match=word) as caught:
        read(path, "csv")
    assert str(caught.value).startswith(f"{path}: line 4: ")
    documents, problems = read(path, "csv", "skip")
    assert [document.passages for document in documents] == [["Good", "one."], ["Fine."]]
    assert len(problems.skipped) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "text\tn\nOne.\t1\t2\n", ": 3 fields, the header has 2\nin TSV tabs part the fields"),
        ("a.csv", "text\tn\nOne.\t1\t2\n", ": 3 fields, the header has 2\nin CSV a field with"),
        ("a.csv", 'text,n\nGood.,1\n"open,2\n' + "more,3\n" * 100, "a.csv: line 3: "),
        ("a.csv", "id;body;n\n1;A longer text.;2\n", r"id, body, n\b[\s\S]*--text-field mine=body"),
    ],
)
def test_faults_are_named_with_their_cures(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / name, content), "csv", source="mine")


def test_a_table_without_a_header_is_told_in_short(tmp_path: Path) -> None:
    """Its first line is a text, which is no name of a column, and is not printed whole."""
    path = write(tmp_path / "a.csv", f'1,"{"Long text. " * 500}"\n2,Short.\n')
    with pytest.raises(UserError, match="first line with the names of its columns") as caught:
        read(path, "csv")
    assert "its first line has: 1, Long text. Long text." in str(caught.value)
    assert "--text-field" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300
