"""The plan of a command of fine-tuning, its results.json, and its tables and curves of results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from data_prep.common.errors import quote
from data_prep.common.files import replaced_name, write_json
from data_prep.common.progress import duration
from data_prep.common.sections import find_facts
from data_prep.common.terminal import make_table
from finetuning.averages import collect_averages, compute_averages
from finetuning.files.splits import FOLDERS
from finetuning.inputs import Items
from finetuning.results import AVERAGES, MODEL, PREDICTIONS, RESULTS, RunResult, TaskResult, format_percent
from finetuning.running.base import Run
from finetuning.running.batches import TrainingBatches
from finetuning.running.records import describe
from finetuning.running.search import find_best, identify_unlabelled, read_begun, read_results, remove_worse_models
from finetuning.session.workers import MachineShare
from finetuning.settings import FineTuning, Varies
from pretraining.checkpoint.record import FOLDER as CHECKPOINTS
from pretraining.huggingface.folders import read_task
from pretraining.reporting.figures import BLUE, GREY, draw, new_figure, read_column, smooth
from pretraining.reporting.metrics_file import METRICS, read_all_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def build_plan(
    runs: Mapping[str, Sequence[Run]], settings: FineTuning, share: MachineShare, memory: float
) -> Iterator[RenderableType]:
    """Yields the table of runs by task, and that of their settings."""
    table = make_table("task", "kind", ">train", ">dev", ">test", ">runs", ">steps of a run")
    for name, own in runs.items():
        task = own[0].task
        steps = {TrainingBatches(task.train, run.settings).steps if run.trains else 0 for run in own}
        row = (name, task.head.kind, f"{len(task.train):,}", count_items(task.dev), count_items(task.test))
        table.add_row(*row, str(len(own)), " or ".join(f"{count:,}" for count in sorted(steps)))
    yield from ("", table, "")
    every = [run.settings for own in runs.values() for run in own]
    varied = {
        fact.label: dict.fromkeys(getattr(own, field) for own in every)
        for field, fact in find_facts(FineTuning, Varies).items()
    }
    common = make_table("how", "")
    for name, value in {
        **{name: ", ".join(map(str, values)) for name, values in varied.items()},
        "warm-up": f"{settings.warmup:.0%} of the steps",
        "length": f"{settings.length} pieces",
        "precision": settings.precision.dtype,
        "at a time": f"{share.jobs} of {len(every)} runs, threads of each: {share.threads}",
        "memory of a run": f"{memory / 1e9:.1f} GB, an estimate",
    }.items():
        common.add_row(name, value)
    yield common


def count_items(splits: Mapping[str, Items]) -> str:
    """Formats the number of items of each split, with its name if there are several."""
    return "\n".join(f"{name if len(splits) > 1 else ''} {len(items):,}".strip() for name, items in splits.items())


def describe_outcome(result: RunResult) -> str:
    """Formats the outcome of a run in one line."""
    if result.failed:
        return f"failed: {result.failed}"
    doubt = "  degenerate" * result.degenerate
    took = "" if result.steps is None else f"  ({duration(result.seconds or 0.0)})"
    return f"{describe(result, result.metric)}{took}{doubt}"


def write_task_results(run: Run) -> TaskResult:
    """Moves the best run's model and predictions beside the runs, and writes the results of the task of any of its
    runs."""
    task, folder = run.task, run.folder.parent
    remove_worse_models(folder)
    runs = read_results(folder)
    for name in runs:  # of a run that was killed when it had its results
        shutil.rmtree(folder / name / CHECKPOINTS, ignore_errors=True)
    best = find_best(runs)
    if best is not None:
        give_back_predictions(folder, best)
        for name in (MODEL, PREDICTIONS):
            if (folder / best / name).exists():
                replace_folder(folder / best / name, folder / name)
    scores = [result.score for result in runs.values() if result.score is not None]
    kept = RunResult() if best is None else runs[best]
    changed = {split for split, said in identify_unlabelled(task).items() if kept.asked.get(split, said) != said}
    late = sorted({*task.dev, *task.test} - {*kept.predicted} | changed)
    result = TaskResult(
        task=task.name,
        metric=task.metric,
        best=best,
        score=kept.score,
        mean=mean(scores) if scores else None,
        median=median(scores) if scores else None,
        spread=[min(scores), max(scores)] if scores else None,
        **kept.get_figures(),
        data=run.begun.data,
        unanswered=[] if best is None else late,
        degenerate=[name for name, result in runs.items() if result.degenerate],
        failed=[name for name, result in runs.items() if result.failed],
        runs=runs,
        baseline=run.find_baseline(),
    )
    result.write(folder / RESULTS)
    return result


def give_back_predictions(folder: Path, best: str) -> None:
    """Moves the predictions of an earlier best run back into its folder, where all other runs have theirs."""
    earlier = TaskResult.read(folder / RESULTS)
    if earlier is None or earlier.best in (None, best):
        return
    shown, own = folder / PREDICTIONS, folder / str(earlier.best) / PREDICTIONS
    if shown.exists() and not own.exists():
        shown.rename(own)


def replace_folder(source: Path, target: Path) -> None:
    """Moves a folder to the place of another, which may not exist."""
    old = replaced_name(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_all_results(results: Sequence[TaskResult], out: Path, model: dict[str, Any]) -> list[TaskResult]:
    """Returns the results of a command's tasks, after those that earlier commands have left in the folder for the same
    model."""
    done, earlier = {result.task for result in results}, []
    for path in sorted(out.glob(f"*/{RESULTS}")):
        begun = [each.model == model for each in read_begun(path.parent).values()]
        if path.parent.name not in done and begun and all(begun):
            earlier.append(TaskResult.read(path))
    return [*(result for result in earlier if result is not None), *results]


def write_results(results: Sequence[TaskResult], out: Path) -> None:
    """Writes the results of all tasks of a folder, with GLUE's averages that lack no task."""
    known = collect_averages({result.task: result for result in results})
    of_tasks = {result.task: result.as_dict() for result in results}
    write_json(out / RESULTS, {**of_tasks, AVERAGES: known} if known else of_tasks)


def build_summary(results: Sequence[TaskResult], out: Path, every: Sequence[TaskResult]) -> Iterator[RenderableType]:
    """Yields the tables of runs, tasks and scores of the best run, the averages of `every` task of the folder, and
    lines on what to do next."""
    runs = make_table("task", "run", ">score", ">time", "")
    tasks = make_table("task", "metric", ">best", ">mean", ">median", ">lowest", ">highest", ">runs")
    others = ["baseline"] * any(result.baseline for result in results)
    scores = make_table("task", "split", ">items", "score of the best run", "± by chance", *others)
    for result in results:
        for name, run in sorted(result.runs.items(), key=lambda own: (own[1].score is None, -(own[1].score or 0.0))):
            took = "" if run.seconds is None else duration(run.seconds)
            flag = "failed" if run.failed else "degenerate" * run.degenerate
            runs.add_row(result.task, name, format_percent(run.score), took, flag)
        lowest, highest = result.spread or (None, None)
        figures = map(format_percent, (result.score, result.mean, result.median, lowest, highest))
        tasks.add_row(result.task, result.metric, *figures, str(len(result.runs)))
        for split, table in result.scores.items():
            place = (result.task, split, f"{result.items[split]:,}" if split in result.items else "")
            for name in table:
                each = (known.format_score(split, name) for known in (result, result.baseline) if known)
                scores.add_row(*place, name, *each)
    yield from ("", runs, "", tasks, "", scores, "")
    yield from describe_averages(every)
    for result in results:
        if result.baseline:
            yield f"{result.task}: baseline: {result.baseline.how}{result.baseline.compare(result)}"
    models = [out / result.task for result in results if (out / result.task / MODEL).exists()]
    for result in results:
        if result.unanswered:
            late = f"{', '.join(result.unanswered)} is new or has changed since the best run, which has not answered it"
            yield f"{result.task}: {late}: give --evaluate --model {quote(out / result.task / MODEL)}"
    yield f"{'the best models, their ' * bool(models)}predictions and all figures are in {out}"
    if models:
        has_vectors = read_task(models[0] / MODEL).get("kind") == "embeddings"
        vectors = " --vectors vectors.npy --nearest QUERIES" * has_vectors
        yield f"next:\n    python finetuning/predict.py {quote(models[0])} TEXTS{vectors}"


def describe_averages(results: Sequence[TaskResult]) -> Iterator[str]:
    """Yields lines on GLUE's averages and what they lack; none with fewer than two of its tasks."""
    by_task = {result.task: result for result in results}
    found = compute_averages(by_task) if len(by_task.keys() & FOLDERS.keys()) > 1 else []
    for average in found:
        if average.score is not None:
            yield f"{average.name}: {format_percent(average.score, average.chance)}"
    for average in found[:1]:
        if average.missing:
            yield f"no {average.name} of all tasks: {', '.join(average.missing)} missing"


def draw_curves(metrics: Mapping[str, Path], best: str | None, metric: str, title: str) -> Figure:
    """Draws the loss by step and the score by epoch of all runs, from their metrics.jsonl; the best run in colour and
    with every split."""
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2)
    for name in sorted(metrics, key=lambda run: run == best):  # the best comes last, on top
        records = list(read_all_records(metrics[name]))
        color = BLUE if name == best else GREY
        steps, losses = read_column(records, "step", "loss")
        left.plot(steps, smooth(losses, 1 + len(losses) // 20), color=color)
        scored = [key for record in records for key in record if key.endswith(f"/{metric}")]
        for split, style in zip(dict.fromkeys(scored) if name == best else scored[:1], ("-", "--", ":"), strict=False):
            epochs, scores = read_column(records, "epoch", split)
            label = split.removesuffix(f"/{metric}") if name == best else None
            right.plot(epochs, 100 * scores, color=color, linestyle=style, marker="o", label=label, clip_on=False)
    left.set(xlabel="step", ylabel="loss of training")
    right.set(xlabel="epoch", ylabel=f"{metric} × 100")
    right.set_ylim(top=min(right.get_ylim()[1], 100.0))
    if right.get_legend_handles_labels()[1]:
        right.legend(frameon=False)
    colours = f"\nblue: {best}, grey: the other runs" if best and len(metrics) > 1 else ""
    figure.suptitle(title + colours, fontsize=11)
    return figure


def draw_task(folder: Path, result: TaskResult) -> list[str]:
    """Draws the losses and scores of a task's runs into curves.png; returns a line if that failed, which fails nothing
    else."""
    metrics = {name: path for name in result.runs if (path := folder / name / METRICS).exists()}
    curves = partial(draw_curves, metrics, result.best, result.metric, result.task)
    return draw(folder / "curves.png", curves) if metrics else []
