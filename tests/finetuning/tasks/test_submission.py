"""The zip that GLUE's leaderboard takes: all of its files, each with as many answers as it has questions."""

from __future__ import annotations

import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from support.commands import refusal

from data_prep.common.errors import UserError
from finetuning.results import PREDICTIONS, RESULTS
from finetuning.run_glue import SUBMISSION, RunGlue
from finetuning.tasks.glue import TASKS, TEST_ROWS, name_leaderboard_file, write_submission


@pytest.fixture(autouse=True)
def _few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest test split is a small one, which makes no difference."""
    monkeypatch.setitem(TEST_ROWS, ("qqp", "test"), 390)


def answers(folder: Path, leave_out: str = "", place: str = "") -> None:
    """Answers to every test split, as many as the leaderboard wants."""
    for (name, split), count in TEST_ROWS.items():
        if (file := name_leaderboard_file(name, split)) != leave_out:
            lines = ["index\tprediction", *(f"{row}\tfrom the model" for row in range(count))]
            (folder / name / place).mkdir(parents=True, exist_ok=True)
            (folder / name / place / file).write_text("\n".join(lines) + "\n")


def test_a_submission_has_all_files_of_the_leaderboard_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    answers(tmp_path)
    folders = [tmp_path / name for name in TASKS]
    for path in (tmp_path / "a.zip", tmp_path / "b.zip"):
        write_submission(folders, path)
    names = "CoLA SST-2 MRPC STS-B MNLI-m MNLI-mm QNLI QQP RTE WNLI AX".split()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"{name}.tsv" for name in names)
        assert archive.read("AX.tsv") == (tmp_path / "mnli/AX.tsv").read_bytes()
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_submission_that_lacks_a_task_is_refused_or_filled(tmp_path: Path) -> None:
    answers(tmp_path, leave_out="STS-B.tsv")
    (tmp_path / "rte/RTE.tsv").unlink()
    folders = [tmp_path / name for name in TASKS]
    assert "2 of its 11 files have no answers yet" in refusal(write_submission, folders, tmp_path / "all.zip")
    assert not (tmp_path / "all.zip").exists()
    write_submission(folders, tmp_path / "all.zip", fill=True)
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        scores, classes = (archive.read(name).decode().splitlines() for name in ("STS-B.tsv", "RTE.tsv"))
        assert archive.read("QQP.tsv") == (tmp_path / "qqp/QQP.tsv").read_bytes()
    assert (len(scores), set(scores[1:])) == (1380, {f"{row}\t0.000" for row in range(1379)})
    assert (len(classes), set(classes[1:])) == (3001, {f"{row}\tentailment" for row in range(3000)})


def test_answers_of_models_that_are_only_scored_are_sent_together(tmp_path: Path) -> None:
    """Each has replaced the results of the one before; where models are trained, those answers are another model's."""
    answers(tmp_path, place=PREDICTIONS)
    (tmp_path / RESULTS).write_text('{"rte": {}}')
    for scores, complete in ((False, False), (True, True)):
        RunGlue(task=("rte",), evaluate=scores).finish(tmp_path, [Mock(test={"test": ()})], Console(quiet=True))
        assert (tmp_path / SUBMISSION).exists() == complete


def test_a_submission_with_a_row_too_few_is_refused(tmp_path: Path) -> None:
    answers(tmp_path)
    path = tmp_path / "wnli/WNLI.tsv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(UserError, match=r"WNLI\.tsv: 145 answers; the leaderboard has 146 questions"):
        write_submission([tmp_path / name for name in TASKS], tmp_path / "all.zip")
