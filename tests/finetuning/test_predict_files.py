"""The files that predict.py reads and writes, and answers for a program that waits for each of them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from support.commands import start
from support.fine_tuned_models import Ask

from finetuning import predict
from finetuning.prediction import load
from pretraining.architectures.weights import Kind

pytest_plugins = ["support.fine_tuned_models"]


FORMS = [
    ("a.txt", "\ufeffa b\r\nc\r\n"),
    ("a.txt", "a b\nc"),
    ("a.tsv", "id\ttext\n1\ta b\n2\tc\n"),
    ("a.csv", '\ufeffid,text\r\n"1,\r\n2",a b\r\n\r\n2,c\r\n'),
    ("A.CSV", "text\na b\nc\n"),
    ("a.csv", 'text;id\n"a b";"1,\r\n2"\nc;2\n'),
    ("a.jsonl", '{"text": "a b"}\n{"text": "c", "more": 1}\n'),
]


@pytest.mark.parametrize(("name", "content"), FORMS)
def test_files_of_every_form(name: str, content: str, folders: dict[Kind, Path], ask: Ask, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert read(ask("score", tmp_path / name)) == load(folders["score"])(["a b", "c"])


def read(printed: str) -> list[Any]:
    return [json.loads(line) for line in printed.splitlines()]


def test_parquet_is_read_some_rows_at_a_time(
    folders: dict[Kind, Path], ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "ROWS", 2)
    sentences = [["a", "word1"], ["b"], ["c", "d", "word2"]]
    pq.write_table(pa.table({"id": [1, 2, 3], "tokens": sentences}), tmp_path / "a.parquet")
    answers = read(ask("tags", tmp_path / "a.parquet"))
    assert [answer["words"] for answer in answers] == sentences
    assert answers == load(folders["tags"])(sentences)


def test_parquet_that_cannot_be_read(ask: Ask, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"review": ["a"]}), tmp_path / "other.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "other.parquet").read_bytes()[:-9])
    faults = {"null": "row 2: 'text' should be a text", "other": "row 1: no field 'text'; there is: review"}
    for name, message in (faults | {"cut": "not a whole Parquet file"}).items():
        assert f"{name}.parquet: {message}" in ask("classes", tmp_path / f"{name}.parquet", code=2)
    message = "standard input: Parquet is read from its end, so name a file"
    assert message in ask("classes", "--format", "parquet", code=2)


def test_columns_for_spreadsheets(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nc\n\n")
    for kind in ("classes", "tags"):
        out = tmp_path / f"{kind}.tsv"
        ask(kind, tmp_path / "a.txt", "--tsv", "--out", out)
        header, *rows = [line.split("\t") for line in out.read_text().splitlines()]
        assert [len(row) for row in rows] == [len(header)] * 3
    assert header == ["words", "tags", "probabilities"]
    assert rows[0][0] == "a b"


def test_answers_take_the_place_of_nothing(folders: dict[Kind, Path], ask: Ask, tmp_path: Path) -> None:
    questions, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    questions.write_text("a b\n")
    (tmp_path / "link").symlink_to("in.txt")
    for path in (questions, tmp_path / "link", folders["classes"] / "config.json"):
        told = "belongs to what is read" if path.name == "config.json" else "is what is read"
        assert f"{path}: {told}" in ask("classes", questions, "--out", path, "--replace", code=2)
    assert questions.read_text() == "a b\n"
    for _ in range(2):  # the same is renewed
        ask("classes", questions, "--out", out)
    assert f"{out}: exists" in ask("score", questions, "--out", out, code=2)
    ask("score", questions, "--out", out, "--replace")
    assert "score" in json.loads(out.read_text())
    ask("classes", questions, "--out", "/dev/null")


def test_a_class_that_is_called_as_a_column_has_one_of_its_own() -> None:
    found = predict.flatten_answer({"label": "b", "probability": 0.7, "probabilities": {"label": 0.3, "b": 0.7}})
    assert found == {"label": "b", "probability": "0.7", "probabilities.label": "0.3", "b": "0.7"}
    found = predict.flatten_answer({"input": {"note": None, "tokens": ["a", "b"]}, "label": "1"})
    assert found == {"note": "", "tokens": "a b", "label": "1"}


FAULTS = [
    ("classes", "a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "a.jsonl:2: no field 'text'; there is: txt"),
    ("classes", "a.jsonl", '{"text": "a"}\nb\n', "a.jsonl:2: not a JSON object"),
    ("classes", "a.jsonl", '["a"]\n', "a.jsonl:1: a JSON list"),
    ("classes", "a.jsonl", '{"text": 1}\n', "a.jsonl:1: 'text' should be a text"),
    ("classes", "a.tsv", "review\nb\nc\n", "a.tsv:1: no field 'text'; there is: review"),
    ("classes", "a.tsv", "a\tb\tc\n", "a.tsv:1: no field 'text'; there is: a, b, c"),
    ("classes", "a.tsv", "id\ttext\n1\n", "a.tsv:2: columns: 1; the first line names 2"),
    ("classes", "a.csv", "id,review\n1,a\n", "a.csv:1: no field 'text'; there is: id, review"),
    ("classes", "a.csv", 'id,text\n1,"a\nb"\n2\n', "a.csv:4: columns: 1; the first line names 2"),
    ("classes", "a.csv", 'id,text\n1,"a\n', "a.csv:2: not a row of CSV"),
    ("classes", "a.csv", "text,id,text\na,1,b\n", "a.csv:1: two columns have the name 'text'"),
    ("spans", "a.txt", "question\tcontext\tcontext\n", "a.txt:1: two columns have the name 'context'"),
    ("spans", "a.txt", "a\tb\n\nwho?\n", "a.txt:3: 1 text; there should be 2 (question, context)"),
    ("tags", "a.jsonl", '{"tokens": [1]}\n', "a.jsonl:1: 'tokens' should be a text or a list of words"),
    ("classes", "a.txt", "a\na\tb\n", "a.txt:2: a line with a tab, and the model does not say"),
    ("classes", "a.txt", "a\nM\udcfcnchen\n", "a.txt:2: not UTF-8"),
    ("classes", "a.txt", "\udc89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.txt: an image"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), FAULTS)
def test_faults_name_their_line(kind: Kind, name: str, content: str, message: str, ask: Ask, tmp_path: Path) -> None:
    """And write nothing into a file."""
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    assert message in ask(kind, tmp_path / name, "--out", tmp_path / "out.jsonl", code=2)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_was_asked_beside_the_answers(
    folders: dict[Kind, Path], ask: Ask, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text("id\ttext\tlabel\n7\ta b\tO\n8\t\tX\n")
    (tmp_path / "b.txt").write_text("a\n")
    words = ("--with-input", tmp_path / "a.tsv")
    rows = read(ask("classes", *words))
    asked = [row.pop("input") for row in rows]
    assert asked == [{"id": "7", "text": "a b", "label": "O"}, {"id": "8", "text": "", "label": "X"}]
    assert rows == load(folders["classes"])(["a b", ""])
    header, first, _ = (line.split("\t") for line in ask("classes", *words, "--tsv").splitlines())
    assert header == ["id", "text", "input.label", "label", "probability", "O", "B-X", "I-X"]
    assert first[:4] == ["7", "a b", "O", rows[0]["label"]]
    (tmp_path / "a.tsv").write_text("id\ttext\tlabel\n7\ta b\tO\n\n")
    (tmp_path / "a.jsonl").write_text('{"id": 7, "text": "a b"}\n\n')
    for name in ("a.tsv", "a.jsonl"):
        lines = ask("classes", "--with-input", "--tsv", tmp_path / name).splitlines()
        assert [line.split("\t")[0] for line in lines] == ["id", "7", ""]
    assert predict.main([str(folders["classes"]), "--tsv", *map(str, words), str(tmp_path / "b.txt")]) == 2
    assert "b.txt: other columns" in capfd.readouterr().err  # after answers to the first


def test_words_apart_are_one_text(folders: dict[Kind, Path], ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\tb\n")
    [answer] = read(ask("tags", "--with-input", "--format", "tabs", tmp_path / "a.txt"))
    assert (answer.pop("input"), answer) == ({"tokens": "a b"}, load(folders["tags"])([["a", "b"]])[0])


def test_a_sentence_is_no_file(folders: dict[Kind, Path], ask: Ask) -> None:
    for sentence in ("a fine film", "a long one, " * 50, "It cost 3.50 dollars"):
        told = f"echo '{sentence}' | python finetuning/predict.py {folders['classes']}"
        assert told in ask("classes", sentence, code=2)


# Through a pipe


TEXTS = ["a fine film", "", "word1 word2 xyz?"]


@pytest.fixture
def model(folders: dict[Kind, Path]) -> Path:
    return folders["classes"]


@pytest.mark.slow
def test_each_row_of_a_pipe_is_answered_before_the_next_and_ctrl_c_ends_it_without_a_word(model: Path) -> None:
    command = [sys.executable, str(ROOT / "finetuning" / "predict.py"), str(model), "--flush"]
    asked: Any = start(command, stdin=subprocess.PIPE)
    for text, answer in zip(TEXTS, load(model)(TEXTS), strict=True):
        asked.stdin.write(f"{text}\n")
        asked.stdin.flush()
        assert json.loads(asked.stdout.readline())["label"] == answer["label"]
    asked.send_signal(signal.SIGINT)
    assert (asked.stderr.read(), asked.wait()) == ("", -signal.SIGINT)
