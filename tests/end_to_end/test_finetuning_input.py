"""Data and models that cannot be used: a message with file and line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.finetuning import TASK, Files, Toy, call, changed, fine_tune
from support.tasks import VOCABULARY
from support.training import assert_well

from data_prep.common.files import write_json

HEAD = "text\tlabel\n"
GOOD = f"{HEAD}a good film\tgood\na bad film\tbad\na fine plot\tgood\n"
REFUSED: dict[str, tuple[Files, str]] = {
    "a missing split": ({"toy.toml": TASK.replace("dev.tsv", "gone.tsv")}, "{data}/gone.tsv: no such file"),
    "too few columns": ({"train.tsv": f"{GOOD}a great film\n"}, "{data}/train.tsv:5: 1 column where there are 2"),
    "an unknown label": ({"dev.tsv": f"{GOOD}a great film\tsuperb\n"}, "{data}/dev.tsv:5: unknown label 'superb'"),
    "a fault in the task": (
        {"toy.toml": TASK.replace("classes", "clases")},
        '{data}/toy.toml: kind = "clases": one of',
    ),
}
"""A case of every layer: of files, of tables, of labels and of descriptions; the others are in tests/finetuning/."""
LONG = f"{GOOD}{'film ' * 10_000}\tgood\n"
TAKEN: dict[str, Files] = {
    "a BOM": {name: b"\xef\xbb\xbf" + GOOD.encode() for name in ("train.tsv", "dev.tsv")},
    "CRLF": {name: GOOD.replace("\n", "\r\n") for name in ("train.tsv", "dev.tsv")},
    "quotes": {"train.tsv": f'{GOOD}a "fine" film, "good\tgood\n"\tbad\n'},
    "a very long text": {
        "dev.tsv": f"{GOOD}{'film ' * 10_000}\tgood\n",
        "train.tsv": f"{GOOD}{'film ' * 10_000}\tbad\n",
    },
    "an empty text": {"dev.tsv": f"{GOOD}\tgood\n", "train.tsv": f"{GOOD}\tbad\n"},
    "more classes than rows": {"toy.toml": f'{TASK}labels = ["good", "bad", "c", "d"]\n', "train.tsv": GOOD},
    "one class of several": {"toy.toml": f'{TASK}labels = ["good", "bad"]\n', "train.tsv": f"{HEAD}film\tgood\n"},
}
pytestmark = pytest.mark.usefixtures("leaves_group")


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, message = REFUSED[case]
    data = changed(toy, tmp_path, files)
    assert call("run_task", toy.command("out", data=data)) == 2
    errors = capsys.readouterr().err
    assert message.format(data=data) in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_files_that_are_taken(toy: Toy, tmp_path: Path) -> None:
    """One command has them all as tasks, each with what there is to say of it."""
    folders = {case: changed(toy, tmp_path / case, files) for case, files in TAKEN.items()}
    for case, folder in folders.items():
        task = (folder / "toy.toml").read_text()
        (folder / "toy.toml").write_text(task.replace('"toy"', f'"{case.replace(" ", "-")}"'))
    _, *options = toy.command("out", "--epochs", "1")
    said = assert_well(fine_tune([*(str(folder / "toy.toml") for folder in folders.values()), *options]))
    for case, folder in folders.items():
        rows = (folder / "dev.tsv").read_bytes().count(b"\n") - 1
        predictions = tmp_path / "out" / case.replace(" ", "-") / "predictions" / "predictions_dev.tsv"
        answers = [line.split("\t")[1] for line in predictions.read_text().splitlines()[1:]]
        assert len(answers) == rows, case
        assert set(answers) <= {"good", "bad", "c", "d"}
    assert "more-classes-than-rows: there are more classes (4) than training items" in said
    assert "one-class-of-several: all training items are 'good'" in said
    assert "an-empty-text: empty texts: 1 of train, 1 of dev" in said


def test_a_model_without_a_vocabulary(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(toy.model, tmp_path / "model"))
    for path in (*model.glob("vocab*"), *model.glob("tokenizer*")):
        path.unlink()
    assert call("run_task", [*toy.command("out"), "--model", str(model)]) == 2
    errors = capsys.readouterr().err
    assert f"error: {model}: " in errors
    assert "vocab.txt" in errors
    assert not (tmp_path / "out").exists()


def test_a_model_whose_case_does_not_fit_is_warned_of(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not VOCABULARY.cased
    model = Path(shutil.copytree(toy.model, tmp_path / "model"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    write_json(model / "tokenizer_config.json", {**settings, "do_lower_case": False})
    (model / "tokenizer.json").unlink()
    assert call("run_task", [*toy.command("out", "--check"), "--model", str(model)]) == 0
    assert f"{model}: text keeps its capitals, but no piece has one" in capsys.readouterr().out


def test_files_of_glue_that_are_refused(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "glue" / "RTE"
    folder.mkdir(parents=True)
    rows = "".join(f"{number}\ta\tb\t{'not_' * (number % 2)}entailment\n" for number in range(4))
    for split, more in (("train", ""), ("dev", "4\ta\tb\tmaybe\n")):
        (folder / f"{split}.tsv").write_text(f"index\tsentence1\tsentence2\tlabel\n{rows}{more}")
    command = ["--model", str(toy.model), "--data", str(tmp_path / "glue"), "--out", str(tmp_path / "out")]
    assert call("run_glue", [*command, "--task", "rte", "--length", "32"]) == 2
    assert f"{folder / 'dev.tsv'}:6: unknown label 'maybe'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["question", "context"])
def test_empty_questions_and_contexts(what: str, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question, context = ("", "a film") if what == "question" else ("what", "")
    asked = {"id": "q", "question": question, "is_impossible": True, "answers": []}
    for split in ("train", "dev"):
        data = [{"title": "t", "paragraphs": [{"context": context, "qas": [asked]}]}]
        write_json(tmp_path / f"{split}-v2.0.json", {"version": "v2.0", "data": data})
    command = ["--version", "2.0", "--model", str(toy.model), "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert call("run_squad", [*command, "--length", "48", "--spans.question", "16", "--spans.stride", "8"]) == 2
    place = "paragraphs[0].qas[0]" if what == "question" else "paragraphs[0]"
    errors = capsys.readouterr().err
    assert f"error: {tmp_path / 'train-v2.0.json'}: data[0].{place}: '{what}' is empty" in errors
    assert not (tmp_path / "out").exists()
