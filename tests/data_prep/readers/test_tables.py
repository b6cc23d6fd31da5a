"""Tables and JSON lines: texts, names, and what is said of what is no row."""

import csv
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.commands import assert_refusal, refusal
from support.reading import COMPRESS, detected, passages, read, write

from data_prep.readers.reader import Document
from data_prep.readers.tables import read_table, read_tsv


def test_json_lines(tmp_path: Path) -> None:
    text = r"""{"text": "One.\n\n Two. \r\nThree.", "id": 7, "title": "T"}

{"text": null}
{"text": "", "_id": "x"}
  {"text": "word", "docid": 1.5, "title": null}
{"text": "a\u0000b \ud83d\ude00", "id": null}
{"text": "no end of line"}"""
    for name, data in (("x.jsonl", text), ("crlf.jsonl", text.replace("\n", "\r\n")), ("mark.jsonl", "\ufeff" + text)):
        path = write(tmp_path / name, data)
        for step in (1 << 20, 5):
            documents, _ = read(path, "jsonl", step=step)
            texts = [["One.", "Two.", "Three."], [], [], ["word"], ["a\x00b 😀"], ["no end of line"]]
            assert [document.passages for document in documents] == texts
            second = path.read_bytes().index(b'{"text": null')
            assert [document.id for document in documents][:4] == ["7", f"{name}:{second}", "x", "1.5"]
            assert [document.title for document in documents] == ["T", "", "", "", "", ""]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2"])
def test_json_lines_in_another_field_and_packed(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x.jsonl{suffix}", COMPRESS[suffix](b'{"content": "One."}\n{"content": "Two."}\n'))
    assert (detected(path), passages(path, "jsonl", text_field="content")) == ("jsonl", [["One."], ["Two."]])


NO_TEXT, NO_OBJECT = "no text in a field 'text'; there is: ", "not a JSON object on one line: "
BAD_LINES = [
    ('{"body": "x", "id": 1}', f"{NO_TEXT}body, id\n--text-field NAME=body names the field"),
    ("{}", f"{NO_TEXT}none\n"),
    ('["x"]', "a JSON list; each line must be an object"),
    ("3", "a JSON int; each line must be an object"),
    ('{"text": 5}', "the field 'text' holds no text; there is: text\n"),
    ('{"text": ["x"]}', "the field 'text' holds no text; there is: text\n"),
    ('{"text": "x"', f"{NO_OBJECT}Expecting ',' delimiter"),
    ("{", NO_OBJECT),
    ("[" * 100_000, NO_OBJECT),
    ('{"text": "x", "id": ' + "9" * 5000 + "}", NO_OBJECT),
    ('{"text": "half \\ud800"}', "half a surrogate pair (U+D800)\n--errors replace writes '?'; --errors skip"),
    ('{"text": "x", "title": "\\udc00"}', "half a surrogate pair (U+DC00)\n"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[line[:20] for line, _ in BAD_LINES])
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "x.jsonl", f'{{"text": "good"}}\n{line}\n{{"text": "fine"}}\n')
    said = refusal(read, path, "jsonl")
    assert said.startswith(f"{path}: byte 17: {message}")
    assert said.endswith("--errors skip leaves the document out and lists it")
    documents, problems = read(path, "jsonl", "skip", step=20)  # of spans in which the line is not the second
    assert [document.passages for document in documents] == [["good"], ["fine"]]
    assert problems.skipped == [said.partition("\n")[0]]


def test_lone_surrogates_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "half \\ud800 of it", "title": "\\udc00", "id": "\\ud801"}\n')
    (document,), problems = read(path, "jsonl", "replace")
    assert document == Document("?", "?", ["half ? of it"])
    assert problems.num_replaced == 2


@pytest.mark.parametrize(("suffix", "part", "end"), [("", ",", "\n"), ("", ";", "\r\n"), (".gz", "\t", "\n")])
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


ROWS = [(b"a,b,c", "3 fields"), (b'"a"b,c', "expected"), (b"caf\xe9,b", "not UTF-8"), (b"only", "1 fields")]


@pytest.mark.parametrize(("row", "word"), ROWS)
def test_what_is_no_row_is_named_by_its_line_and_can_be_left_out(tmp_path: Path, row: bytes, word: str) -> None:
    path = write(tmp_path / "a.csv", b'text,n\n"Good\none.",1\n' + row + b"\nFine.,2\n")
    assert re.match(f"{path}: line 4: .*{word}", refusal(read, path, "csv"))
    documents, problems = read(path, "csv", "skip")
    assert [document.passages for document in documents] == [["Good", "one."], ["Fine."]]
    assert len(problems.skipped) == 1


FAULTS = [
    ("a.tsv", "text\tn\nOne.\t1\t2\n", ": 3 fields, the header has 2\nin TSV tabs part the fields"),
    ("a.csv", "text\tn\nOne.\t1\t2\n", ": 3 fields, the header has 2\nin CSV a field with"),
    ("a.csv", 'text,n\nGood.,1\n"open,2\n' + "more,3\n" * 100, "a.csv: line 3: "),
    ("a.csv", "id;body;n\n1;A longer text.;2\n", r"id, body, n\b[\s\S]*--text-field mine=body"),
]


@pytest.mark.parametrize(("name", "content", "message"), FAULTS)
def test_faults_are_named_with_their_cures(tmp_path: Path, name: str, content: str, message: str) -> None:
    assert_refusal(message, read, write(tmp_path / name, content), "csv", source="mine")


def test_a_table_without_a_header_is_told_in_short(tmp_path: Path) -> None:
    """Its first line is a text, which is no name of a column, and is not printed."""
    path = write(tmp_path / "a.csv", f'1,"{"Long text. " * 500}"\n2,Short.\n')
    said = refusal(read, path, "csv")
    assert "a first line with the names of its columns" in said
    assert "--text-field" not in said
    assert len(said) < len(str(path)) + 300
    assert passages(write(path, f"text,{'what a note may be about ' * 9}\nOne.,2\n"), "csv") == [["One."]]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_text(tmp_path: Path) -> None:
    for name, content in {"a.tsv": "text\tlabel\r\na\t1\r\n", "a.csv": "text,label\r\na,1\r\n"}.items():
        table = read_table(write(tmp_path / name, b"\xef\xbb\xbf" + content.encode()))
        assert (table.column("text"), table.column("label")) == (["a"], ["1"])


def test_values_of_json_and_parquet_are_spelled_as_text(tmp_path: Path) -> None:
    columns = {"text": ["é", "b"], "label": [1, 0], "score": pa.array([3.8, 4.0], pa.float32()), "good": [True, False]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = [("é", 1, 3.8, True), ("b", 0, 4.0, False)]
    write(tmp_path / "a.jsonl", "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    for name in ("a.jsonl", "a.parquet"):
        table = read_table(tmp_path / name)
        assert (table.column("text"), table.column("label")) == (["é", "b"], ["1", "0"])
        assert list(map(float, table.column("score"))) == [3.8, 4.0]
        assert table.column("good") == ["true", "false"]


def test_columns_that_nobody_asks_for_may_hold_anything(tmp_path: Path) -> None:
    """Lists, missing keys, bytes."""
    write(tmp_path / "a.jsonl", '{"text": "a", "spans": [1, 2]}\n\n{"text": "b", "id": {}}\n')
    pq.write_table(pa.table({"image": [b"\xff", b""], "text": ["a", "b"], "at": [[1.0], []]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert read_table(tmp_path / name).column("text") == ["a", "b"]


WRONG: list[tuple[str, str | bytes | None, str]] = [
    ("a.tsv", "", "a.tsv: the file is empty"),
    ("a.tsv", "\n\n", "a.tsv: the file is empty"),
    ("a.csv", b"\xef\xbb\xbf", "a.csv: the file is empty"),
    ("a.tsv", "text\tlabel\n", "a.tsv: no rows after the names of the columns (text, label)"),
    ("a.tsv", "text\tlabel\na\t1\nb\n", "a.tsv:3: 1 column where there are 2: text, label"),
    ("a.tsv", "text\tlabel\na\t1\t2\n", "a.tsv:2: 3 columns where there are 2: text, label"),
    ("a.csv", 'text,label\n"a\nb",1\nc\n', "a.csv:4: 1 column where there are 2: text, label"),
    ("a.csv", 'text,label\na,1\n"b,1\n', "a.csv:3: not a row of CSV: unexpected end of data"),
    ("a.tsv", b"text\tlabel\na\t1\n\xe9\t1\n", "a.tsv:3: not UTF-8"),
    ("a.tsv", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.tsv: an image"),
    ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl:2: not a JSON object on one line: Expecting value"),
    ("a.jsonl", '{"text": "a"}\n["b"]\n', "a.jsonl:2: a JSON list; each line must be an object"),
    ("a.jsonl", '{"text": "a"}\n\n{"label": 1}\n', "a.jsonl:3: no value of 'text'"),
    ("a.jsonl", '{"text": null}\n', "a.jsonl:1: no value of 'text'"),
    ("a.jsonl", '{"text": ["a"]}\n', "a.jsonl:1: no value of 'text'"),
    ("a.tsv", "sentence\tlabel\na\t1\n", "a.tsv: no column 'text'; there is 'sentence', 'label'"),
    ("a.parquet", b"PAR1", "a.parquet: not a whole Parquet file"),
    *((f"a.{kind}", None, f"a.{kind}: no such file") for kind in ("tsv", "csv", "jsonl", "parquet")),
    ("a.txt", "text\n", "a.txt: the name ends in none of .tsv, .csv, .jsonl, .parquet"),
]


@pytest.mark.parametrize(("name", "content", "said"), WRONG)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, name: str, content: str | bytes | None, said: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    told = refusal(lambda: read_table(tmp_path / name).column("text"))
    assert told.startswith(f"{tmp_path}/{said}")


def test_empty_lines_at_the_end_are_rows_of_a_single_column_alone(tmp_path: Path) -> None:
    assert len(read_table(write(tmp_path / "a.tsv", "text\na\n\n\n"))) == 3
    assert len(read_table(write(tmp_path / "a.tsv", "text\tlabel\na\t1\n\n\n"))) == 1


def test_a_null_in_parquet_is_told_where_its_column_is_needed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None], "label": [1, 0]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table.column("label") == ["1", "0"]
    assert_refusal(r"a\.parquet:2: no value of 'text'", table.column, "text")


def test_lines_are_counted_and_short_rows_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path / "a.csv", 'text,label\n"a\nc",1\n\nd,0\n')).lines) == [2, 5]
    table = read_tsv(write(tmp_path / "a.tsv", "text\tlabel\na\t1\nb\nc\t0\n"), skip_short=True)
    assert (table.column("text"), list(table.lines), table.skipped) == (["a", "c"], [2, 4], 1)


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r\ufeff"), max_size=20)
ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)
Rows = list[tuple[str, str]]


@settings(max_examples=50)
@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8))
@example([('"He said "no', "1"), ('"', "0"), ("a\x0bb\x0cc\x1cd\u2028e\x85f\rg", "1")])  # str.splitlines parts at these
@example([("word " * 200_000, "1")])
def test_tsv_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    path = tmp_path_factory.mktemp("tsv") / "a.tsv"
    write(path, "".join(f"{first}\t{second}\n" for first, second in [("text", "label"), *rows]))
    table = read_table(path)
    assert list(zip(table.column("text"), table.column("label"), strict=True)) == rows


@settings(max_examples=50)
@given(st.lists(st.tuples(ANYTHING, ANYTHING), min_size=1, max_size=8))
@example([('a, "b"\nc', "1"), ("d", "0")])
@example([("word " * 200_000, "1")])
def test_csv_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, rows: Rows) -> None:
    path, content = tmp_path_factory.mktemp("csv") / "a.csv", io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([("text", "label"), *rows])
    table = read_table(write(path, content.getvalue()))
    assert list(zip(table.column("text"), table.column("label"), strict=True)) == rows
