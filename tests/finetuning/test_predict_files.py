"""The files that predict.py reads and writes: their forms, their faults, and what stands beside the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetuning import predict
from finetuning.prediction import load
from pretraining.huggingface.weights import Kind

pytest_plugins = ["support.fine_tuned_models"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\ufeffa b\r\nc\r\n"),
        ("a.txt", "a b\nc"),
        ("a.tsv", "id\ttext\n1\ta b\n2\tc\n"),
        ("a.csv", '\ufeffid,text\r\n"1,\r\n2",a b\r\n\r\n2,c\r\n'),
        ("A.CSV", "text\na b\nc\n"),
        ("a.csv", 'text;id\n"a b";"1,\r\n2"\nc;2\n'),
        ("a.jsonl", '{"text": "a b"}\n{"text": "c", "more": 1}\n'),
    ],
)
def test_files_of_every_form(
    name: str, content: str, folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert predict.main([str(folders["score"]), str(tmp_path / name)]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert answers == load(folders["score"])(["a b", "c"])


def test_parquet_is_read_some_rows_at_a_time(
    folders: dict[Kind, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(predict, "ROWS", 2)
    sentences = [["a", "word1"], ["b"], ["c", "d", "word2"]]
    pq.write_table(pa.table({"id": [1, 2, 3], "tokens": sentences}), tmp_path / "a.parquet")
    assert predict.main([str(folders["tags"]), str(tmp_path / "a.parquet")]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [answer["words"] for answer in answers] == sentences
    assert answers == load(folders["tags"])(sentences)


def test_parquet_that_cannot_be_read(
    folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"review": ["a"]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "other.parquet").read_bytes()[:-9])
    for name, message in {
        "null.parquet": "null.parquet: row 2: 'text' should be a text",
        "other.parquet": "other.parquet: row 1: no field 'text'; there is: review",
        "cut.parquet": "cut.parquet: not a whole Parquet file",
    }.items():
        assert predict.main([str(folders["classes"]), str(tmp_path / name)]) == 2
        assert message in capfd.readouterr().err
    assert predict.main([str(folders["classes"]), "--format", "parquet"]) == 2
    assert "standard input: Parquet is read from its end, so name a file" in capfd.readouterr().err


def test_columns_for_spreadsheets(folders: dict[Kind, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nc\n\n")
    for kind in ("classes", "tags"):
        out = tmp_path / f"{kind}.tsv"
        assert predict.main([str(folders[kind]), str(tmp_path / "a.txt"), "--tsv", "--out", str(out)]) == 0
        header, *rows = [line.split("\t") for line in out.read_text().splitlines()]
        assert len(rows) == 3
        assert {len(row) for row in rows} == {len(header)}
    assert header == ["words", "tags", "probabilities"]
    assert rows[0][0] == "a b"


def test_answers_take_the_place_of_nothing(
    folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    questions, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    questions.write_text("a b\n")
    (tmp_path / "link").symlink_to("in.txt")
    command = [str(folders["classes"]), str(questions), "--out"]
    for name in ("in.txt", "link"):
        assert predict.main([*command, str(tmp_path / name), "--replace"]) == 2
        assert f"{tmp_path / name}: is what is read" in capfd.readouterr().err
    assert predict.main([*command, str(folders["classes"] / "config.json"), "--replace"]) == 2
    assert questions.read_text() == "a b\n"
    assert [predict.main([*command, str(out)]) for _ in range(2)] == [0, 0]  # the same is renewed
    assert predict.main([str(folders["score"]), str(questions), "--out", str(out)]) == 2
    assert f"{out}: exists" in capfd.readouterr().err
    assert predict.main([str(folders["score"]), str(questions), "--out", str(out), "--replace"]) == 0
    assert "score" in json.loads(out.read_text())
    assert predict.main([*command, "/dev/null"]) == 0


def test_a_class_that_is_called_as_a_column_has_one_of_its_own() -> None:
    answer = {"label": "b", "probability": 0.7, "probabilities": {"label": 0.3, "b": 0.7}}
    assert predict.flatten_answer(answer) == {
        "label": "b",
        "probability": "0.7",
        "probabilities.label": "0.3",
        "b": "0.7",
    }


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("classes", "a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "a.jsonl:2: no field 'text'; there is: txt"),
        ("classes", "a.jsonl", '{"text": "a"}\nb\n', "a.jsonl:2: not a JSON object"),
        ("classes", "a.jsonl", '["a"]\n', "a.jsonl:1: a JSON list"),
        ("classes", "a.jsonl", '{"text": 1}\n', "a.jsonl:1: 'text' should be a text"),
        ("classes", "a.tsv", "review\nb\nc\n", "a.tsv:1: no field 'text'; there is: review"),
        ("classes", "a.tsv", "a\tb\tc\n", "a.tsv:1: no field 'text'; there is: a, b, c"),
        ("classes", "a.tsv", "id\ttext\n1\n", "a.tsv:2: 1 column; the first line names 2"),
        ("classes", "a.csv", "id,review\n1,a\n", "a.csv:1: no field 'text'; there is: id, review"),
        ("classes", "a.csv", 'id,text\n1,"a\nb"\n2\n', "a.csv:4: 1 column; the first line names 2"),
        ("classes", "a.csv", 'id,text\n1,"a\n', "a.csv:2: not a row of CSV"),
        ("classes", "a.csv", "text,id,text\na,1,b\n", "a.csv:1: two columns have the name 'text'"),
        ("spans", "a.txt", "question\tcontext\tcontext\n", "a.txt:1: two columns have the name 'context'"),
        ("spans", "a.txt", "a\tb\n\nwho?\n", "a.txt:3: 1 text; there should be 2: question, context"),
        ("tags", "a.jsonl", '{"tokens": [1]}\n', "a.jsonl:1: 'tokens' should be a text or a list of words"),
    ],
)
def test_faults_name_their_line(
    kind: Kind,
    name: str,
    content: str,
    message: str,
    folders: dict[Kind, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And write nothing into a file."""
    (tmp_path / name).write_text(content)
    out = tmp_path / "out.jsonl"
    assert predict.main([str(folders[kind]), str(tmp_path / name), "--out", str(out)]) == 2
    assert message in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_was_asked_beside_the_answers(
    folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text("id\ttext\tlabel\n7\ta b\tO\n8\t\tX\n")
    (tmp_path / "b.txt").write_text("a\n")
    command = ["--with-input", str(folders["classes"]), str(tmp_path / "a.tsv")]
    assert predict.main(command) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row.pop("input") for row in rows] == [
        {"id": "7", "text": "a b", "label": "O"},
        {"id": "8", "text": "", "label": "X"},
    ]
    assert rows == load(folders["classes"])(["a b", ""])
    assert predict.main(["--tsv", *command]) == 0
    header, first, _ = (line.split("\t") for line in capfd.readouterr().out.splitlines())
    assert header == ["id", "text", "input.label", "label", "probability", "O", "B-X", "I-X"]
    assert first[:4] == ["7", "a b", "O", rows[0]["label"]]
    (tmp_path / "a.tsv").write_text("id\ttext\tlabel\n7\ta b\tO\n\n")
    assert predict.main(["--tsv", *command]) == 0
    assert [line.split("\t")[0] for line in capfd.readouterr().out.splitlines()] == ["id", "7", ""]
    assert predict.main(["--tsv", *command, str(tmp_path / "b.txt")]) == 2
    assert "b.txt: other columns" in capfd.readouterr().err


def test_words_apart_are_one_text(folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a\tb\n")
    assert predict.main(["--with-input", "--format", "tabs", str(folders["tags"]), str(tmp_path / "a.txt")]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer.pop("input") == {"tokens": "a b"}
    assert answer == load(folders["tags"])([["a", "b"]])[0]


@pytest.mark.parametrize("sentence", ["a fine film", "a long one, " * 50, "It cost 3.50 dollars"])
def test_a_sentence_is_no_file(sentence: str, folders: dict[Kind, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert predict.main([str(folders["classes"]), sentence]) == 2
    assert f"echo '{sentence}' | python finetuning/predict.py {folders['classes']}" in capfd.readouterr().err


def test_text_that_is_not_utf8_names_its_line(
    folders: dict[Kind, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\nM\xfcnchen\n")
    assert predict.main([str(folders["classes"]), str(tmp_path / "a.txt")]) == 2
    assert "a.txt:2: not UTF-8" in capfd.readouterr().err
    (tmp_path / "a.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    assert predict.main([str(folders["classes"]), str(tmp_path / "a.txt")]) == 2
    said = capfd.readouterr().err
    assert "a.txt: a PNG image" in said
    assert "iconv" not in said
