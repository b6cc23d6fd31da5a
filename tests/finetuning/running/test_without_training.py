"""Scores without training: of a fine-tuned model, of WNLI as the paper answered it; and the leaderboard's zip."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.base_models import write_bert
from support.finetuning import RECIPE, call, results, write_toy
from support.tasks import VOCABULARY

pytestmark = pytest.mark.usefixtures("leaves_group")


def test_a_fine_tuned_model_scores_as_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = write_toy(tmp_path / "toy")
    assert call("run_task", toy.command("out")) == 0
    trained = toy.folder / "out" / "toy"
    (toy.folder / "train.tsv").unlink()  # which only training needs
    again = toy.command("again", "--evaluate")
    again[again.index("--model") + 1] = str(trained / "model")
    assert call("run_task", again) == 0
    (name,), first = results(toy.folder / "again")["runs"], results(toy.folder / "out")
    assert name == "scored"
    assert results(toy.folder / "again")["scores"] == first["scores"]
    for split in ("dev", "test"):
        file = f"predictions/predictions_{split}.tsv"
        assert (toy.folder / "again" / "toy" / file).read_bytes() == (trained / file).read_bytes()
    assert not (toy.folder / "again" / "toy" / "model").exists()
    assert "0 of" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--evaluate"], "not fine-tuned for a task"),
        (["--evaluate", "--check"], "not fine-tuned for a task"),
        (["--evaluate", "--from-scratch"], "fresh weights"),
    ],
)
def test_what_has_learned_nothing_is_not_scored(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = write_toy(tmp_path / "toy")
    assert call("run_task", toy.command("out", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (toy.folder / "out").exists()


def write_glue(folder: Path) -> None:
    """WNLI and RTE in a few rows, with test splits."""
    for name, labels in (("WNLI", ("1", "0", "1")), ("RTE", ("entailment", "not_entailment"))):
        (folder / name).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            rows = [[str(row), "a b", "a c", labels[row % len(labels)]] for row in range(9)]
            columns = ["index", "sentence1", "sentence2", "label"][: 3 if split == "test" else 4]
            lines = [columns, *(row[: len(columns)] for row in rows)]
            (folder / name / f"{split}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))


def run_glue(folder: Path, *more: str) -> int:
    """The command on the tasks in a folder."""
    write_bert(folder / "model", VOCABULARY)
    (folder / "recipe.toml").write_text(RECIPE)
    own = ["--model", "model", "--data", "glue", "--recipe", "recipe.toml", "--out", "out"]
    return call("run_glue", [str(folder / word) if not word.startswith("-") else word for word in own] + [*more])


def results_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return found


def test_wnli_is_answered_with_the_majority_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_glue(tmp_path / "glue")
    grid = ("--task", "wnli", "--glue.wnli_majority", "true", "--seeds", "3")
    assert run_glue(tmp_path, *grid) == 0
    wnli = results_of(tmp_path)["wnli"]
    assert list(wnli["runs"]) == ["scored"]
    assert wnli["scores"]["dev"]["accuracy"] == pytest.approx(6 / 9)
    answers = (tmp_path / "out/wnli/predictions/WNLI.tsv").read_text().splitlines()
    assert answers == ["index\tprediction", *(f"{row}\t1" for row in range(9))]
    assert not (tmp_path / "out/wnli/model").exists()
    assert "submission" not in capsys.readouterr().out  # who names tasks does not want the zip


def test_the_zip_of_the_leaderboard_is_written_when_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_glue(tmp_path / "glue")
    of_rte = ("--task", "rte", "--epochs", "1")
    assert run_glue(tmp_path, *of_rte) == 0
    assert not (tmp_path / "out/submission.zip").exists()
    monkeypatch.setattr("finetuning.tasks.glue.TEST_ROWS", {("rte", "test"): 9, ("wnli", "test"): 9})
    assert run_glue(tmp_path, *of_rte) == 0
    assert "submission" not in capsys.readouterr().out
    assert run_glue(tmp_path, *of_rte, "--submission") == 0
    with zipfile.ZipFile(tmp_path / "out/submission.zip") as archive:
        assert sorted(archive.namelist()) == ["RTE.tsv", "WNLI.tsv"]
        assert archive.read("RTE.tsv") == (tmp_path / "out/rte/predictions/RTE.tsv").read_bytes()
    (tmp_path / "out/submission.zip").unlink()
    assert run_glue(tmp_path, "--task", "wnli", "--glue.wnli_majority", "true") == 0
    assert (tmp_path / "out/submission.zip").exists()
