"""Results of several models beside each other; GLUE's averages: the paper's numbers give the paper's average; charts:
what they show, that nothing in them overlaps, that they are whole files or none, and never fail a run."""

import json
import runpy
import shutil
import sys
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from support.commands import run_main
from support.finetuning import call, results, write_toy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from finetuning.averages import collect_averages, compute_averages
from finetuning.compare import main
from finetuning.results import TaskResult
from finetuning.session import report
from pretraining.reporting import figures


def write(folder: Path, runs: int = 1, dev: str = "200 rows, checksum 12", **scores: float | None) -> str:
    """Results of tasks."""
    folder.mkdir(parents=True)
    found: dict[str, Any] = {}
    for name, score in scores.items():
        found[name] = {"metric": "accuracy", "score": score, "spreads": {"dev": {"accuracy": 0.02}}}
        found[name]["scores"] = {} if score is None else {"dev": {"accuracy": score}}
        found[name]["data"] = {"train": "9 rows, checksum 34", "dev": dev}
        found[name]["runs"] = {f"seed{number}": {"score": score} for number in range(runs)}
    (folder / "results.json").write_text(json.dumps(found))
    return str(folder)


def test_scores_stand_beside_each_other(tmp_path: Path) -> None:
    one = write(tmp_path / "mini" / "glue", sst2=0.801, rte=0.5, mrpc=0.9)
    other = write(tmp_path / "base" / "glue", sst2=0.9, cola=None, mrpc=0.905)
    assert [line.split() for line in run_main(main, one, other).splitlines()] == [
        ["task", "metric", "mini/glue", "base/glue", "difference", "by", "chance"],
        ["sst2", "accuracy", "80.1", "90.0", "+9.9", "±", "2.8"],
        ["rte", "accuracy", "50.0"],
        ["mrpc", "accuracy", "90.0", "90.5", "+0.5", "±", "2.8,", "within", "it"],
        ["cola", "accuracy"],
    ]


@pytest.mark.parametrize(
    ("unlike", "named"),
    [({"runs": 5}, "the best of 5 runs"), ({"dev": "180 rows, checksum 56"}, "other items in dev (200 rows")],
)
def test_what_is_not_alike_has_no_difference(unlike: dict[str, Any], named: str, tmp_path: Path) -> None:
    said = run_main(main, write(tmp_path / "a", sst2=0.8), write(tmp_path / "b", sst2=0.9, **unlike))
    _, row, note = said.splitlines()
    assert row.split() == ["sst2", "accuracy", "80.0", "90.0"]
    assert note.startswith("sst2: not alike")
    assert named in note


def test_what_has_no_results_is_told(tmp_path: Path) -> None:
    assert f"{tmp_path}: no results.json" in run_main(main, tmp_path, code=2)
    (tmp_path / "results.json").write_text('{"task": "sst2", "metric": "accuracy", "score": 0.5}')
    assert "name the folder above it" in run_main(main, tmp_path, code=2)
    assert "python finetuning/compare.py runs/" in run_main(main, code=2)


def test_damaged_results_are_named(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", sst2=0.8)) / "results.json"
    whole = json.loads(path.read_text())
    wrong: Any = [{"score": "x"}, {"score": float("nan")}, {"runs": []}, {"spreads": []}, {"scores": {"dev": 1}}]
    wrong.append({"spreads": {"dev": {"accuracy": "x"}}})
    contents: list[Any] = [[], "x", None, {}, *({"sst2": {**whole["sst2"], **each}} for each in wrong)]
    for content in contents:
        path.write_text(json.dumps(content))
        assert f"{path}: no results of a command of finetuning/, or damaged" in run_main(main, tmp_path / "a", code=2)


def test_names_are_shown_as_they_are_and_files_lead_to_their_folders(tmp_path: Path) -> None:
    names = [write(tmp_path / name, runs=runs, sst2=0.8) for name, runs in (("a", 1), ("[bold]b", 1), ("c", 2))]
    assert run_main(main, names[0]).splitlines()[1].split() == ["sst2", "accuracy", "80.0"]
    head, _, note = run_main(main, f"{names[0]}/results.json", *names[1:]).splitlines()
    assert "[bold]b" in head
    assert note.startswith("sst2: not alike (c): one run and the best of 2")


def test_a_baseline_stands_before_the_scores_and_one_that_is_better_is_called_so(tmp_path: Path) -> None:
    """A task without one has none there."""
    paths = [write(tmp_path / name, sst2=0.8, swag=0.5) for name in ("a", "b")]
    baseline = {"how": "TF-IDF", "data": {}, "scores": {"dev": {"accuracy": 0.85}}}
    found = json.loads((tmp_path / "b" / "results.json").read_text())
    found["sst2"]["baseline"] = baseline
    (tmp_path / "b" / "results.json").write_text(json.dumps(found))
    header, first, second = (line.split() for line in run_main(main, *paths).splitlines())
    assert (header[:4], first[:5]) == ("task metric baseline a".split(), "sst2 accuracy 85.0 80.0 80.0".split())
    assert second[:4] == "swag accuracy 50.0 50.0".split()
    better, within = ", better than the best run", ", within chance of the best run"
    errors = {"spreads": {"dev": {"accuracy": 0.03}}}  # those of the run are 0.02
    cases: list[tuple[Any, Any, str]] = [
        (0.80, {}, better),
        (0.90, {}, ""),
        (0.84, {}, within),
        (0.86, {}, within),
        (None, {}, ""),
    ]
    for score, more, verdict in [*cases, (0.82, {}, better), (0.82, errors, within), (0.88, errors, within)]:
        content = {**found["sst2"], "baseline": {**baseline, **more}, "task": "t", "score": score}
        known = TaskResult.model_validate(content)
        lines = [part for part in report.build_summary([known], tmp_path, []) if isinstance(part, str)]
        assert f"t: baseline: TF-IDF{verdict}" in lines


def test_a_baseline_of_other_items_stands_beside_no_score(tmp_path: Path) -> None:
    """Of two classes by F1 without one, and of three with one."""
    paths = [write(tmp_path / "a", sst2=0.8), write(tmp_path / "b", dev="180 rows, checksum 56", sst2=0.7)]
    for path, metric in zip(map(Path, paths), ("f1", "accuracy"), strict=True):
        found = json.loads((path / "results.json").read_text())
        found["sst2"] |= {"metric": metric, "scores": {"dev": {metric: 0.5}}}
        if metric == "accuracy":
            data = found["sst2"]["data"]
            found["sst2"]["baseline"] = {"how": "TF-IDF", "data": data, "scores": {"dev": {"accuracy": 0.85}}}
        (path / "results.json").write_text(json.dumps(found))
    assert "85.0" not in run_main(main, *paths)
    assert "85.0" in run_main(main, *paths[::-1])


# GLUE's averages


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
        found[task] = result(task, dev={"accuracy": value})
        if figure := FIGURES.get(task):
            found[task] = result(task, "average", dev={figure: value, "average": value - 0.1})
    return found if wnli is None else {**found, "wnli": result("wnli", dev={"accuracy": wnli / 100})}


def test_every_task_weighs_the_same_for_the_leaderboard() -> None:
    row, results = PAPERS["base"], glue(PAPERS["base"])
    others = [value - 10 * (task in FIGURES) for task, value in zip(TASKS, row[2:], strict=False)]
    eight, found = (row[0] + row[1]) / 2 + sum(others), collect_averages(results)
    assert 100 * found["average without wnli"] == pytest.approx(eight / 8)
    assert 100 * found["average"] == pytest.approx((eight + 65.1) / 9)
    chance = compute_averages(results)[0].chance  # that of all tasks together
    assert chance == pytest.approx((8 * 0.02**2 + 2 * 0.01**2) ** 0.5 / 9)


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
    _, paper, lacking = report.describe_averages([*glue(row, wnli=None).values()])
    assert paper.startswith("average as in the paper: 79.6 ± 0.")
    assert lacking == "no average of all tasks: wnli missing"
    assert list(report.describe_averages([glue(row)["rte"]])) == [], "who asks for one task wants no average"


def test_averages_of_folders_stand_beside_each_other(tmp_path: Path) -> None:
    for name, row in PAPERS.items():
        (tmp_path / name).mkdir()
        report.write_results([*glue(row, wnli=None if name == "gpt" else 65.1).values()], tmp_path / name)
        kept = json.loads((tmp_path / name / "results.json").read_text())
        assert kept["averages"]["average as in the paper"] == pytest.approx(row[-1] / 100, abs=5e-4)
        assert kept["rte"]["score"] == row[8] / 100
    lines = run_main(main, *(tmp_path / name for name in PAPERS)).splitlines()
    paper = "average as in the paper 75.2 79.6 81.9 +6.7 ± 0.9".split()
    assert [line.split() for line in lines if "paper" in line] == [paper]
    assert [len(line.split()) for line in lines if line.startswith("average  ")] == [3], "gpt lacks wnli"


# Charts


def texts(figure: Figure) -> list[str]:
    """All that can be read in a figure."""
    figure.canvas.draw()
    found = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]
    return [text for text in found if text.strip()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """The pairs of texts that lie on one another, and those that are cut off, as 800 dots across show them."""
    figure.set_dpi(100)
    figure.canvas.draw()
    parts: list[Any] = [*figure.texts]
    for axes in figure.axes:
        parts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            inside = [tick for tick in axis.get_major_ticks() if min(limits) <= tick.get_loc() <= max(limits)]
            parts += [label for tick in inside for label in (tick.label1, tick.label2) if label.get_visible()]
    boxes = [(part.get_text(), part.get_window_extent()) for part in dict.fromkeys(parts) if part.get_text().strip()]
    pairs = [(one, other) for (one, box), (other, second) in combinations(boxes, 2) if box.overlaps(second)]
    out = [(name, "the edge") for name, box in boxes if box.x0 < -1 or box.x1 > 801 or box.y0 < -1]
    return pairs + out


def write_metrics(path: Path, steps: int, *scores: float) -> Path:
    """The log of a run, with the metrics of two splits of dev after each epoch."""
    lines = [{"kind": "step", "step": step, "epoch": step / steps, "loss": 1 / step} for step in range(1, steps + 1)]
    lines[-1]["loss"] = None  # what JSON has for a loss that is not finite
    for epoch, score in enumerate(scores, 1):
        figures = {"dev_matched/accuracy": score, "dev_mismatched/accuracy": score / 2, "dev_matched/f1": 0.0}
        lines.append({"kind": "scores", "step": steps, "epoch": float(epoch), **figures})
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": "st')
    return path


def test_curves_show_losses_and_the_scores_of_every_split(tmp_path: Path) -> None:
    runs = {
        "one": write_metrics(tmp_path / "one.jsonl", 100, 0.5, 0.7),
        "two": write_metrics(tmp_path / "two.jsonl", 100, 0.5, 0.6),
        "none": tmp_path / "missing.jsonl",
    }
    figure: Any = report.draw_curves(runs, "one", "accuracy", "mnli")
    left, right = figure.axes
    blue = [line for line in right.lines if to_hex(line.get_color()).upper() == figures.BLUE]
    assert [line.get_xydata().tolist() for line in blue] == [[[1, 50], [2, 70]], [[1, 25], [2, 35]]]
    assert {"dev_matched", "dev_mismatched", "mnli\nblue: one, grey: the other runs"} <= set(texts(figure))
    assert right.get_ylabel() == "accuracy × 100"  # of which split, the legend says
    perfect: Any = report.draw_curves({"one": write_metrics(tmp_path / "p.jsonl", 9, 0.9, 1.0)}, "one", "accuracy", "t")
    assert perfect.axes[1].get_ylim()[1] == 100
    one, two = (found for line in left.lines if (found := list(line.get_ydata())))
    assert one == two
    assert one[:2] == pytest.approx([1, (1 + 1 / 2) / 2])
    assert one[-1] == pytest.approx(sum(1 / step for step in range(95, 100)) / 5)
    assert overlaps(figure) == []


def test_a_chart_is_the_same_bytes_every_time_and_wide_enough(tmp_path: Path) -> None:
    runs = {"one": write_metrics(tmp_path / "one.jsonl", 100, 0.5, 0.7)}
    for name in ("one.png", "two.png"):
        figures.save(report.draw_curves(runs, "one", "accuracy", "中文"), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert imread(tmp_path / "one.png").shape[1] == figures.WIDTH * figures.DPI


def test_training_does_not_load_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # so that importing it fails
    runpy.run_path(report.__file__)


# Beside the results of a command


pytestmark = pytest.mark.usefixtures("leaves_group")


def pictures(folder: Path) -> set[str]:
    """The names of the charts of a task, each of which can be read."""
    found = sorted(folder.glob("*.png"))
    assert all(imread(path).shape[1] > 400 for path in found)
    return {path.stem for path in found}


@pytest.mark.slow
def test_charts_are_drawn_beside_results(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    shutil.copy(toy.data / "dev.tsv", toy.data / "test.tsv")  # a test split with labels is scored too
    grid = ["--search.learning_rates", "[1e-3, 3e-3]", "--epochs", "1", "--logging.tensorboard", "true"]
    assert call("run_task", toy.command("out", *grid), charts=True) == 0
    assert pictures(toy.folder / "out" / "toy") == {"curves"}
    assert len(results(toy.folder / "out")["runs"]) == 2
    events = EventAccumulator(str(toy.folder / "out" / "toy" / "lr0.001-seed1"))
    events.Reload()
    assert {tag.partition("/")[0] for tag in events.Tags()["scalars"]} == {"train", "dev", "test"}
    assert {"dev/accuracy", "test/accuracy"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_what_cannot_be_drawn_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no font"))
    toy = write_toy(tmp_path / "toy")
    monkeypatch.setattr(report, "draw_curves", broken)
    monkeypatch.setattr(figures, "save", broken)
    said = run_main(partial(call, "run_task", charts=True), *toy.command("out"))
    assert "curves.png: not drawn: RuntimeError: no font" in said
    assert results(toy.folder / "out")["score"] is not None
    assert not pictures(toy.folder / "out" / "toy")
