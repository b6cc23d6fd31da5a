"""The zip that GLUE's leaderboard takes: all of its files, each with as many answers as it has questions."""

import json
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from support.commands import refusal
from support.finetuning import Toy, Tune
from support.tasks import write_small_glue

from finetuning.results import PREDICTIONS, RESULTS
from finetuning.run_glue import SUBMISSION, RunGlue
from finetuning.tasks.glue import TASKS, TEST_ROWS, name_leaderboard_file, write_submission


@pytest.fixture(autouse=True)
def _few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest test split is a small one, which makes no difference."""
    monkeypatch.setitem(TEST_ROWS, ("qqp", "test"), 390)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Folders of tasks with as many answers as the leaderboard wants."""
    write_answers(tmp_path)
    return [tmp_path / name for name in TASKS]


def write_answers(folder: Path, place: str = "") -> None:
    for (name, split), count in TEST_ROWS.items():
        lines = ["index\tprediction", *(f"{row}\tfrom the model" for row in range(count))]
        file = folder / name / place / name_leaderboard_file(name, split)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


def test_a_submission_has_all_files_of_the_leaderboard_and_the_same_bytes_every_time(
    folders: list[Path], tmp_path: Path
) -> None:
    for path in (tmp_path / "a.zip", tmp_path / "b.zip"):
        write_submission(folders, path)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = "CoLA SST-2 MRPC STS-B MNLI-m MNLI-mm QNLI QQP RTE WNLI AX".split()
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in names)
        assert archive.read("AX.tsv") == (tmp_path / "mnli/AX.tsv").read_bytes()
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_submission_that_lacks_a_task_or_a_row_is_refused_or_filled(folders: list[Path], tmp_path: Path) -> None:
    out, wnli = tmp_path / "all.zip", tmp_path / "wnli/WNLI.tsv"
    for file in ("stsb/STS-B.tsv", "rte/RTE.tsv"):
        (tmp_path / file).unlink()
    assert "2 of its 11 files have no answers yet" in refusal(write_submission, folders, out)
    assert not out.exists()
    write_submission(folders, out, fill=True)
    with zipfile.ZipFile(out) as archive:
        scores, classes = (archive.read(name).decode().splitlines() for name in ("STS-B.tsv", "RTE.tsv"))
        assert archive.read("QQP.tsv") == (tmp_path / "qqp/QQP.tsv").read_bytes()
    assert (len(scores), set(scores[1:])) == (1380, {f"{row}\t0.000" for row in range(1379)})
    assert (len(classes), set(classes[1:])) == (3001, {f"{row}\tentailment" for row in range(3000)})
    wnli.write_text("\n".join(wnli.read_text().splitlines()[:-1]) + "\n")
    said = refusal(write_submission, folders, out, fill=True)
    assert "WNLI.tsv: 145 answers; the leaderboard has 146 questions" in said


def test_answers_of_models_that_are_only_scored_are_sent_together(tmp_path: Path) -> None:
    """Each has replaced the results of the one before; where models are trained, those answers are another model's."""
    write_answers(tmp_path, PREDICTIONS)
    (tmp_path / RESULTS).write_text('{"rte": {}}')
    for scores, complete in ((False, False), (True, True)):
        RunGlue(task=("rte",), evaluate=scores).finish(tmp_path, [Mock(test={"test": ()})], Console(quiet=True))
        assert (tmp_path / SUBMISSION).exists() == complete


@pytest.mark.slow
def test_the_zip_is_written_when_it_can_be(
    toy: Toy, tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was trained, and of WNLI, which is answered with the majority once, whatever the grid."""
    write_small_glue(tmp_path / "glue")
    out = tmp_path / "out"
    archive = out / "submission.zip"
    monkeypatch.setattr("finetuning.tasks.glue.TEST_ROWS", {("rte", "test"): 9, ("wnli", "test"): 9})
    command = ["--model", toy.model, "--data", tmp_path / "glue", "--out", out]
    command += ["--recipe", toy.data / "recipe.toml", "--task"]
    of_rte = [*command, "rte", "--epochs", 1]
    assert "submission" not in tune(of_rte, "run_glue"), "who names tasks does not want the zip"
    tune([*of_rte, "--submission"], "run_glue")
    with zipfile.ZipFile(archive) as opened:
        assert sorted(opened.namelist()) == ["RTE.tsv", "WNLI.tsv"]
        assert opened.read("RTE.tsv") == (out / "rte/predictions/RTE.tsv").read_bytes()
    archive.unlink()
    tune([*command, "wnli", "--glue.wnli_majority", "true", "--seeds", 3], "run_glue")
    assert archive.exists()
    wnli = json.loads((out / "results.json").read_text())["wnli"]
    assert (list(wnli["runs"]), wnli["scores"]["dev"]["accuracy"]) == (["scored"], pytest.approx(6 / 9))
    assert not (out / "wnli/model").exists()
