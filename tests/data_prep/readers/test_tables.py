"""Tables in files: what is read of each format, and that what is wrong is told with its line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.common.errors import UserError
from data_prep.readers.tables import read_table, read_tsv


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_quotation_mark_in_tsv_is_a_character(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.tsv", 'text\tlabel\n"He said "no\t1\n"\t0\n'))
    assert table.column("text") == ['"He said "no', '"']
    assert table.column("label") == ["1", "0"]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_text(tmp_path: Path) -> None:
    for name, content in {"a.tsv": "text\tlabel\r\na\t1\r\n", "a.csv": "text,label\r\na,1\r\n"}.items():
        table = read_table(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode()))
        assert (table.column("text"), table.column("label")) == (["a"], ["1"])


def test_only_line_feeds_part_the_rows_of_tsv(tmp_path: Path) -> None:
    """str.splitlines would part rows at these too."""
    text = "a\x0bb\x0cc\x1cd\u2028e\x85f\rg"
    assert read_table(write(tmp_path / "a.tsv", f"text\tlabel\n{text}\t1\n")).column("text") == [text]


def test_a_field_of_csv_may_hold_commas_quotes_and_line_ends(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "a.csv", 'text,label\n"a, ""b""\nc",1\n\nd,0\n'))
    assert table.column("text") == ['a, "b"\nc', "d"]
    assert list(table.lines) == [2, 5]


def test_values_of_json_and_parquet_are_spelled_as_text(tmp_path: Path) -> None:
    rows = [
        {"text": "é", "label": 1, "score": 3.8, "good": True},
        {"text": "b", "label": 0, "score": 4.0, "good": False},
    ]
    write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    kinds = {"text": pa.string(), "label": pa.int64(), "score": pa.float32(), "good": pa.bool_()}
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        table = read_table(tmp_path / name)
        assert table.column("text") == ["é", "b"]
        assert table.column("label") == ["1", "0"]
        assert list(map(float, table.column("score"))) == [3.8, 4.0]
        assert table.column("good") == ["true", "false"]


def test_columns_that_nobody_asks_for_may_hold_anything(tmp_path: Path) -> None:
    """Lists, missing keys, bytes."""
    write(tmp_path / "a.jsonl", '{"text": "a", "spans": [1, 2]}\n\n{"text": "b", "id": {}}\n')
    pq.write_table(pa.table({"image": [b"\xff", b""], "text": ["a", "b"], "at": [[1.0], []]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert read_table(tmp_path / name).column("text") == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", "", "a.tsv: the file is empty"),
        ("a.tsv", "\n\n", "a.tsv: the file is empty"),
        ("a.csv", b"\xef\xbb\xbf", "a.csv: the file is empty"),
        ("a.tsv", "text\tlabel\n", "a.tsv: no rows after the names of the columns (text, label)"),
        ("a.tsv", "text\tlabel\na\t1\nb\n", "a.tsv:3: 1 column where there are 2: text, label"),
        ("a.tsv", "text\tlabel\na\t1\t2\n", "a.tsv:2: 3 columns where there are 2: text, label"),
        ("a.csv", 'text,label\n"a\nb",1\nc\n', "a.csv:4: 1 column where there are 2: text, label"),
        ("a.csv", 'text,label\na,1\n"b,1\n', "a.csv:3: not a row of CSV: unexpected end of data"),
        ("a.tsv", b"text\tlabel\na\t1\n\xe9\t1\n", "a.tsv:3: not UTF-8"),
        ("a.tsv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.tsv: a PNG image"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl:2: not a JSON object on one line: Expecting value"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "a.jsonl:2: a JSON list; each line must be an object"),
        ("a.jsonl", '{"text": "a"}\n\n{"label": 1}\n', "a.jsonl:3: no value of 'text'"),
        ("a.jsonl", '{"text": null}\n', "a.jsonl:1: no value of 'text'"),
        ("a.jsonl", '{"text": ["a"]}\n', "a.jsonl:1: no value of 'text'"),
        ("a.tsv", "sentence\tlabel\na\t1\n", "a.tsv: no column 'text'; there is sentence, label"),
        ("a.parquet", b"PAR1", "a.parquet: not a whole Parquet file"),
        ("a.txt", "text\n", "a.txt: the name ends in none of .tsv, .csv, .jsonl, .parquet"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    write(tmp_path / name, content)
    with pytest.raises(UserError) as error:
        read_table(tmp_path / name).column("text")
    assert str(error.value).startswith(f"{tmp_path}/{said}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("a.tsv", "a.csv", "a.jsonl", "a.parquet"):
        with pytest.raises(UserError, match="no such file"):
            read_table(tmp_path / name)


def test_a_null_in_parquet_is_told_where_its_column_is_needed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None], "label": [1, 0]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.column("label") == ["1", "0"]
    with pytest.raises(UserError, match=r"a\.parquet:2: no value of 'text'"):
        table.column("text")


def test_short_rows_are_left_out_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\na\t1\nb\nc\t0\n")
    table = read_tsv(path, skip_short=True)
    assert (table.column("text"), list(table.lines), table.skipped) == (["a", "c"], [2, 4], 1)


def test_a_text_of_a_million_characters_is_one_field(tmp_path: Path) -> None:
    text = "word " * 200_000
    for name, content in {"a.tsv": f"text\tlabel\n{text}\t1\n", "a.csv": f"text,label\n{text},1\n"}.items():
        assert read_table(write(tmp_path / name, content)).column("text") == [text]


Rows = list[tuple[str, str]]
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\ufeff"), max_size=20)


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8))
def test_tsv_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("tsv") / "a.tsv"
    write(path, "".join(f"{first}\t{second}\n" for first, second in [("text", "label"), *rows]))
    table = read_table(path)
    assert list(zip(table.column("text"), table.column("label"), strict=True)) == rows


ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)


@given(st.lists(st.tuples(ANYTHING, ANYTHING), min_size=1, max_size=8))
def test_csv_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path, content = tmp_path_factory.mktemp("csv") / "a.csv", io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([("text", "label"), *rows])
    table = read_table(write(path, content.getvalue()))
    assert list(zip(table.column("text"), table.column("label"), strict=True)) == rows
