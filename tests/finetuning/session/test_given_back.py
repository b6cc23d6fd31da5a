"""Every run keeps its predictions, whichever of them was the best before."""

from __future__ import annotations

from pathlib import Path

from finetuning.results import PREDICTIONS, RESULTS, TaskResult
from finetuning.session.report import give_back_predictions


def after_a_grid(folder: Path, best: str) -> None:
    """What a grid leaves: the best run's predictions lie in the task's folder, not in its own."""
    TaskResult(task="toy", metric="accuracy", best=best, runs={}).write(folder / RESULTS)
    (folder / "first").mkdir()
    (folder / PREDICTIONS).mkdir()
    (folder / PREDICTIONS / "dev.tsv").write_text("of first")


def test_a_run_that_is_the_best_no_more_gets_its_predictions_back(tmp_path: Path) -> None:
    after_a_grid(tmp_path, "first")
    give_back_predictions(tmp_path, "second")
    assert (tmp_path / "first" / PREDICTIONS / "dev.tsv").read_text() == "of first"
    assert not (tmp_path / PREDICTIONS).exists()
    (tmp_path / PREDICTIONS).mkdir()  # the next best's; killed before that was noted
    give_back_predictions(tmp_path, "second")
    assert (tmp_path / "first" / PREDICTIONS / "dev.tsv").read_text() == "of first"
    assert (tmp_path / PREDICTIONS).exists()


def test_the_best_run_stays_where_it_is(tmp_path: Path) -> None:
    after_a_grid(tmp_path, "first")
    give_back_predictions(tmp_path, "first")
    assert (tmp_path / PREDICTIONS / "dev.tsv").exists()
