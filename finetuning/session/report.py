"""What came of a command of fine-tuning: tables and results.json."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from data_prep.common.files import replaced_name, write_json
from data_prep.common.progress import duration
from finetuning.places import MODEL, PREDICTIONS, RESULTS
from finetuning.running.records import describe, percent
from finetuning.running.search import best_of, remove_worse_models, results_of
from finetuning.running.without_training import CERTAINTY
from finetuning.tasks.task import Task
from pretraining.checkpoint.record import FOLDER as CHECKPOINTS

SHOWN = 10
"""Runs of a task that are shown one by one."""
TOGETHER = 2
"""Figures of a line, which terminals of 80 columns have room for."""


def outcome(results: Mapping[str, Any]) -> str:
    """One line on what came of a run."""
    if "failed" in results:
        return f"failed: {results['failed']}"
    scores = describe(results["scores"], results["metric"], results.get("items"), results.get("spreads"))
    doubt = "  degenerate" * results.get("degenerate", False)
    took = f"  ({duration(results['seconds'])})" if "steps" in results else ""
    return f"{scores}{took}{doubt}"


def conclude(task: Task, folder: Path, data: Mapping[str, str]) -> dict[str, Any]:
    """Puts the best run's model and predictions beside the runs, and writes what came of all of them; `data` tells the
    items of every split from others."""
    remove_worse_models(folder)
    runs = results_of(folder)
    for name in runs:  # of a run that was killed when it had its results
        shutil.rmtree(folder / name / CHECKPOINTS, ignore_errors=True)
    best = best_of(runs)
    if best is not None:
        for name in (MODEL, PREDICTIONS):
            if (folder / best / name).exists():
                replace_folder(folder / best / name, folder / name)
    scores = [results["score"] for results in runs.values() if results["score"] is not None]
    results = {
        "task": task.name,
        "metric": task.metric,
        "best": best,
        "score": None if best is None else runs[best]["score"],
        "median": median(scores) if scores else None,
        "spread": [min(scores), max(scores)] if scores else None,
        "scores": {} if best is None else runs[best]["scores"],
        **{name: {} if best is None else runs[best].get(name, {}) for name in CERTAINTY},
        "data": data,
        "unanswered": [] if best is None else [*{**task.dev, **task.test}.keys() - {*runs[best]["predicted"]}],
        "degenerate": [name for name, results in runs.items() if results.get("degenerate")],
        "failed": [name for name, results in runs.items() if "failed" in results],
        "runs": runs,
    }
    write_json(folder / RESULTS, results)
    return results


def replace_folder(source: Path, target: Path) -> None:
    """Puts a folder in the place of another, or of none."""
    old = replaced_name(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def summary(all_results: Sequence[Mapping[str, Any]], out: Path) -> Iterator[RenderableType]:
    """What came of every task: its runs, the best first; how much they differ; all scores of the best; what is next."""
    runs = table_of("task", "run", ">score", ">time", "")
    tasks = table_of("task", "metric", ">best", ">median", ">lowest", ">highest", ">runs")
    scores = table_of("task", "split", ">items", "scores of the best run, ± by chance")
    for results in all_results:
        name, spread = results["task"], results["spread"] or [None, None]
        for row in rows_of(results["runs"]):
            runs.add_row(name, *row)
        figures = [percent(figure) for figure in (results["score"], results["median"], *spread)]
        tasks.add_row(name, results["metric"], *figures, str(len(results["runs"])))
        for split, table in results["scores"].items():
            spreads, items = results["spreads"].get(split, {}), results["items"].get(split)
            said = [f"{figure} {percent(value, spreads.get(figure))}" for figure, value in table.items()]
            place = (name, split, "" if items is None else f"{items:,}")
            for begin in range(0, len(said), TOGETHER):
                scores.add_row(*(place if not begin else ("", "", "")), ", ".join(said[begin : begin + TOGETHER]))
    yield from ("", runs, "", tasks, "", scores, "")
    for results in all_results:
        for kind, text in (("degenerate", "the same answer for every item"), ("failed", "failed")):
            if named := results[kind]:
                yield f"{results['task']}: {len(named)} of {len(results['runs'])} runs: {text}: {', '.join(named)}"
        if late := results["unanswered"]:
            yield (
                f"{results['task']}: {', '.join(late)} came after the best run, and is not answered: give --evaluate "
                f"--model {out / results['task'] / MODEL}"
            )
    yield f"the best models, their predictions and all figures are in {out}"
    models = [out / results["task"] for results in all_results if (out / results["task"] / MODEL).exists()]
    if models:
        yield f"next:\n    python finetuning/predict.py {models[0]}"


def rows_of(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Rows on the runs of a task, the best first: name, score, time, and what is to be said of it."""
    names = sorted(runs, key=lambda name: (runs[name]["score"] is None, -(runs[name]["score"] or 0.0)))
    for name in names[:SHOWN]:
        run = runs[name]
        flag = "failed" * ("failed" in run) or "degenerate" * run.get("degenerate", False)
        yield name, percent(run["score"]), duration(run["seconds"]) if "seconds" in run else "", flag
    if rest := [percent(runs[name]["score"]) or "failed" for name in names[SHOWN:]]:
        yield f"and {len(rest)} more, {rest[0]} to {rest[-1]}", "", "", ""


def table_of(*columns: str) -> Table:
    """A plain table; columns whose names begin with > are of figures."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table
