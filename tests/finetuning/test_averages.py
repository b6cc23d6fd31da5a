"""GLUE's averages: the paper's own numbers give the paper's own average, and what is missing has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.common.terminal import open_console
from finetuning.averages import collect_averages, compute_averages
from finetuning.compare import build_table
from finetuning.results import TaskResult
from finetuning.session.report import describe_averages, write_results

PAPERS = {  # Devlin et al., October 2018, Table 1, in its order, with the average that it prints
    "gpt": (82.1, 81.4, 70.3, 88.1, 91.3, 45.4, 80.0, 82.3, 56.0, 75.2),
    "base": (84.6, 83.4, 71.2, 90.1, 93.5, 52.1, 85.8, 88.9, 66.4, 79.6),
    "large": (86.7, 85.9, 72.1, 91.1, 94.9, 60.5, 86.5, 89.3, 70.1, 81.9),
}
TASKS = ("qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
FIGURES = {"qqp": "f1", "mrpc": "f1", "stsb": "spearman"}


def result(task: str, metric: str = "accuracy", **dev: dict[str, float]) -> TaskResult:
    spreads = {split: dict.fromkeys(figures, 0.02) for split, figures in dev.items()}
    score = next(iter(dev.values()))[metric]
    return TaskResult(task=task, metric=metric, score=score, scores=dev, spreads=spreads, runs={})


def glue(row: tuple[float, ...], wnli: float | None = 65.1) -> dict[str, TaskResult]:
    """Results with a row of the paper's table; where runs are compared by another figure, that is 10 points lower."""
    matched, mismatched, *others = (value / 100 for value in row[:9])
    found = {"mnli": result("mnli", dev_matched={"accuracy": matched}, dev_mismatched={"accuracy": mismatched})}
    for task, value in zip(TASKS, others, strict=True):
        if figure := FIGURES.get(task):
            found[task] = result(task, "average", dev={figure: value, "average": value - 0.1})
        else:
            found[task] = result(task, dev={"accuracy": value})
    return found if wnli is None else {**found, "wnli": result("wnli", dev={"accuracy": wnli / 100})}


@pytest.mark.parametrize("row", PAPERS.values(), ids=PAPERS)
def test_the_papers_figures_have_its_average(row: tuple[float, ...]) -> None:
    assert 100 * collect_averages(glue(row))["average as in the paper"] == pytest.approx(row[-1], abs=0.05)


def test_every_task_weighs_the_same_for_the_leaderboard() -> None:
    row = PAPERS["base"]
    eight = [
        (row[0] + row[1]) / 2,
        *(value - 10 * (task in FIGURES) for task, value in zip(TASKS, row[2:], strict=False)),
    ]
    found = collect_averages(glue(row))
    assert 100 * found["average without wnli"] == pytest.approx(sum(eight) / 8)
    assert 100 * found["average"] == pytest.approx((sum(eight) + 65.1) / 9)


def test_chance_is_that_of_all_tasks_together() -> None:
    nine = compute_averages(glue(PAPERS["base"]))[0]
    assert nine.chance == pytest.approx((8 * 0.02**2 + 2 * 0.01**2) ** 0.5 / 9)


def test_what_is_missing_has_no_average_and_is_named() -> None:
    without = compute_averages(glue(PAPERS["base"], wnli=None))
    assert [average.missing for average in without] == [("wnli",), (), ()]
    lost = glue(PAPERS["base"])
    lost["rte"] = lost["rte"].model_copy(update={"score": None, "scores": {}})
    lost["mnli"] = result("mnli", dev_matched={"accuracy": 0.8})
    assert {average.missing for average in compute_averages(lost)} == {("mnli", "rte")}, "a half of MNLI is not MNLI"
    assert collect_averages(lost) == {}


def test_the_console_has_averages_and_says_what_they_lack() -> None:
    row = PAPERS["base"]
    assert next(describe_averages([*glue(row).values()])).startswith("average: 7")
    known, paper, lacking = describe_averages([*glue(row, wnli=None).values()])
    assert known.startswith("average without wnli: 7")
    assert paper.startswith("average as in the paper: 79.6 ± 0.")
    assert lacking == "no average of all tasks: wnli missing"
    assert list(describe_averages([glue(row)["rte"]])) == [], "who asks for one task wants no average"


def test_averages_of_two_folders_stand_beside_each_other(tmp_path: Path) -> None:
    folders = []
    for name, row in PAPERS.items():
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        write_results([*glue(row, wnli=None if name == "gpt" else 65.1).values()], folders[-1])
        kept = json.loads((folders[-1] / "results.json").read_text())
        assert kept["averages"]["average as in the paper"] == pytest.approx(row[-1] / 100, abs=5e-4)
        assert kept["rte"]["score"] == row[8] / 100
    with (console := open_console()).capture() as said:
        console.print(build_table(tuple(folders)))
    lines = said.get().splitlines()
    assert [line.split() for line in lines if "paper" in line] == [
        ["average", "as", "in", "the", "paper", "75.2", "79.6", "81.9", "+6.7", "±", "0.9"]
    ]
    assert "average: gpt has none: wnli missing" in lines
