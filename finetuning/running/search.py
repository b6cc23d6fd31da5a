"""The runs of a task: one for every combination of searched settings and seed; the best on dev is kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.sections import May, find_facts, list_settings
from finetuning.results import BEGUN, MODEL, PREDICTIONS, RESULTS, Begun, ModelScores, RunResult
from finetuning.running.base import Base, Run
from finetuning.running.batches import RULE
from finetuning.running.loop import Tuner
from finetuning.running.outputs import BrokenError, add_certainty, compute_model_outputs, score_splits
from finetuning.scale import ScoreScale
from finetuning.settings import FineTuning, Varies
from finetuning.tasks.task import Column, Task
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.record import FOLDER as CHECKPOINTS
from pretraining.engine.precision import name_dtype
from pretraining.processes.context import Context
from pretraining.processes.group import gather, shared_errors

NOT_COMPARED = {*list_settings(FineTuning, May.CHANGE_BETWEEN_STARTS)}
"""Settings that may change during a search: they change the outcome of a run by rounding alone."""

NO_SCORES = ModelScores()
SCALE = "scale"
"""The key beside the splits of data for the scale of their scores."""


def list_run_settings(settings: FineTuning) -> dict[str, FineTuning]:
    """Lists the settings of a recipe's runs, by name; those of the first seed come first."""
    search, runs = settings.search, {}
    learning_rates = search.learning_rates or (settings.learning_rate,)
    batches, epochs = search.batches or (settings.batch,), search.epochs or (settings.epochs,)
    for number, batch, epoch, learning_rate in product(range(search.seeds), batches, epochs, learning_rates):
        seed = settings.seed + number
        parts = [f"lr{learning_rate:g}"]
        parts += [f"batch{batch}"] * (len(batches) > 1) + [f"epochs{epoch:g}"] * (len(epochs) > 1)
        own = {"learning_rate": learning_rate, "batch": batch, "epochs": epoch, "seed": seed}
        runs["-".join([*parts, f"seed{seed}"])] = settings.model_copy(update=own)
    return runs


def list_runs(task: Task, settings: FineTuning, folder: Path, model: dict[str, Any], trains: bool) -> list[Run]:
    """Lists the runs of a task in its folder, a single one without training. `model` identifies the initial model.
    UserError where a run was begun with other settings, model or data."""
    data = identify_data(task) | ({} if trains else identify_unlabelled(task))
    earlier = read_begun(folder)
    names = {json.dumps(begun.settings, sort_keys=True): name for name, begun in earlier.items()}
    runs = []
    for name, own in (list_run_settings(settings) if trains else {"scored": settings}).items():
        begun = Begun(settings=select_deciding_settings(own), model=model, data=data, batches=RULE if trains else "")
        # It has another name if more or fewer settings were searched when it was begun.
        name = names.get(json.dumps(begun.settings, sort_keys=True), name)
        runs.append(Run(task, own, folder / name, begun, trains))
    require_same(folder, {run.name: run.begun for run in runs})
    return runs


def select_deciding_settings(settings: FineTuning) -> dict[str, Any]:
    """Selects the settings that determine the outcome of a run."""
    return settings.model_dump(mode="json", exclude=NOT_COMPARED)


def identify_data(task: Task) -> dict[str, str]:
    """Identifies the data of a task: row count and checksum of every split, and the scale of its scores, without which
    older runs cannot continue."""
    data = {split: _describe(task.list_columns(split)) for split in ("train", *task.dev)}
    return data if task.scale == ScoreScale() else {**data, SCALE: f"{task.scale.mean:.9g} ± {task.scale.spread:.9g}"}


def identify_unlabelled(task: Task) -> dict[str, str]:
    """Identifies the data that is only predicted: row count and checksum of every split."""
    return {split: _describe(task.list_columns(split)) for split in task.test}


def _describe(columns: Sequence[Column]) -> str:
    seen = hashlib.sha256()
    for column in columns:
        if isinstance(column, np.ndarray):
            seen.update(column.tobytes())
        else:
            seen.update("\0".join(column).encode(errors="surrogatepass"))
    return f"{len(columns[0]):,} rows, checksum {seen.hexdigest()[:16]}"


def require_same(task: Path, wanted: Mapping[str, Begun]) -> None:
    """Refuses the folder of a task where a run was begun with another model, other data or other settings.

    `wanted` has the planned runs by name. Other runs, with which they are compared, may differ in searched settings
    alone. A run may lack splits that have been added since.
    """
    for name, begun in read_begun(task).items():
        varied = {name: begun.settings[name] for name in find_facts(FineTuning, Varies) if name in begun.settings}
        other, folder = next(iter(wanted.values())), task / name
        now = wanted.get(name) or other.model_copy(update={"settings": {**other.settings, **varied}})
        if begun.data:
            known = {split: said for split, said in now.data.items() if split in begun.data or split == SCALE}
            now = now.model_copy(update={"data": known})
        then, wants = (each.model_dump(exclude={"threads"}) for each in (begun, now))
        if changes := list_differences(then, wants):
            listed = "\n    ".join([f"{folder}: this run was begun otherwise:", *changes])
            raise UserError(f"{listed}\ncontinue it as it was begun, or name another folder with --out")


def read_begun(task: Path) -> dict[str, Begun]:
    """Reads what the runs of a task were begun with, by name, with the defaults of settings that did not exist then."""
    found = {}
    for path in sorted(task.glob(f"*/{BEGUN}")):
        begun = Begun.read(path) or Begun()
        with suppress(ValidationError):  # a setting of then is none any more, which the comparison names
            settings = FineTuning.model_validate_json(json.dumps(begun.settings))
            begun = begun.model_copy(update={"settings": select_deciding_settings(settings)})
        found[path.parent.name] = begun
    return found


def list_differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """Lists the differences of two nested tables, by name with both values."""
    found = []
    for name in {**now, **before}:
        then, new = before.get(name, {}), now.get(name, {})
        if isinstance(then, Mapping) and isinstance(new, Mapping):
            found += list_differences(then, new, f"{within}{name}.")
        elif then != new:
            spelled = ("none" if value in ({}, None, "") else str(value) for value in (then, new))
            found.append(f"{within}{name}: {' -> '.join(spelled)}")
    return found


def begin_run(run: Run, context: Context) -> None:
    """Writes begun.json. All ranks call it together.

    A run that continues on the same number of ranks keeps its number of threads, unless the settings name one, so that
    sums are rounded the same way.
    """
    threads = gather(torch.get_num_threads())
    with shared_errors():
        if context.world.rank == 0:
            before = Begun.read(run.folder / BEGUN)
            if before and len(before.threads) == len(threads) and not run.settings.compute.threads:
                threads = before.threads
            run.begun.model_copy(update={"threads": threads}).write(run.folder / BEGUN)
    torch.set_num_threads(gather(threads)[0][context.world.rank])


def read_results(task: Path) -> dict[str, RunResult]:
    """Reads the results of finished runs of a task, by name."""
    found = {path.parent.name: RunResult.read(path) for path in sorted(task.glob(f"*/{RESULTS}"))}
    return {name: result for name, result in found.items() if result is not None}


def find_best(runs: Mapping[str, RunResult]) -> str | None:
    """Returns the name of the run with the best score, the first of equal ones; None if all have failed."""
    scores = {name: result.score for name, result in runs.items() if result.score is not None}
    return max(scores, key=scores.__getitem__, default=None)


def remove_worse_models(task: Path) -> None:
    """Removes the models of finished runs but the best."""
    runs = read_results(task)
    for name in runs.keys() - {find_best(runs)}:
        shutil.rmtree(task / name / MODEL, ignore_errors=True)


def train(run: Run, base: Base, context: Context) -> RunResult:
    """Trains a run, from where it was stopped, and writes its results. All ranks call it together."""
    folder = run.folder
    begin_run(run, context)
    tuner = Tuner(run, base, context)
    try:
        state = tuner.train()
    except BrokenError as error:
        result = _make_result(run, failed=str(error))
    else:
        result = _make_result(
            run,
            state.kept,
            steps=state.step,
            seconds=round(state.seconds, 2),
            items_per_second=round(state.items / state.seconds, 2),
            dtype=name_dtype(tuner.engine.dtype),
            ranks=context.world.size,
            device=context.device.type,
        )
    tuner.close()
    with shared_errors():
        if context.world.rank == 0:
            result.write(folder / RESULTS)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            for name in (MODEL, PREDICTIONS) if result.failed else ():
                shutil.rmtree(folder / name, ignore_errors=True)
    return result


def score(run: Run, model: StoredModel, context: Context) -> RunResult:
    """Scores a fine-tuned model, or answers that need none, and writes the results. All ranks call it together."""
    task, result = run.task, _make_result(run)
    outputs = task.answer_without_model() or compute_model_outputs(task, model, run.settings, context)
    with shared_errors():
        if context.world.rank == 0:
            run.begun.write(run.folder / BEGUN)
            for split, output in outputs.items():
                task.write_predictions(split, output, run.folder / PREDICTIONS)
            result = _make_result(run, add_certainty(task, score_splits(task, outputs), outputs))
            result.write(run.folder / RESULTS)
    return result


def _make_result(run: Run, scores: ModelScores = NO_SCORES, **figures: Any) -> RunResult:
    """Makes the result of a run with these scores."""
    task, metric = run.task, run.task.metric
    score = next((table[metric] for table in scores.scores.values()), None)
    figures |= {"settings": run.begun.settings, "predicted": [*task.dev, *task.test], **scores.as_dict()}
    figures["asked"] = identify_unlabelled(task)
    return RunResult(run=run.name, metric=metric, score=score, **figures)
