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


def test_a_file_is_refused(toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other faults of files, tables, labels and descriptions are in tests/finetuning/."""
    data = changed(toy, tmp_path, {"dev.tsv": f"{GOOD}a great film\tsuperb\n"})
    assert call("run_task", toy.command("out", data=data)) == 2
    errors = capsys.readouterr().err
    assert f"{data}/dev.tsv:5: unknown label 'superb'" in errors
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
    assert "one-class-of-several: dev has what train never has, so that nobody can learn it: bad" in said


def test_a_model_whose_case_does_not_fit_is_warned_of(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not VOCABULARY.cased
    model = Path(shutil.copytree(toy.model, tmp_path / "model"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    write_json(model / "tokenizer_config.json", {**settings, "do_lower_case": False})
    (model / "tokenizer.json").unlink()
    assert call("run_task", [*toy.command("out", "--check"), "--model", str(model)]) == 0
    assert f"{model}: text is not put into lower case" in capsys.readouterr().out
