"""The runs of a task: one for every combination of what is searched and every seed; the best on dev is kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from data_prep.common.errors import UserError
from data_prep.common.files import read_json, write_json
from finetuning.places import BEGUN, MODEL, PREDICTIONS, RESULTS
from finetuning.running.base import Base, differences
from finetuning.running.feature_folder import write_features
from finetuning.running.loop import Run
from finetuning.running.outputs import BrokenError, Outputs
from finetuning.running.without_training import score
from finetuning.settings import VARIED, FineTuning
from finetuning.tasks.task import Task
from pretraining.checkpoint.record import FOLDER as CHECKPOINTS
from pretraining.engine.precision import name_dtype
from pretraining.processes.context import Context
from pretraining.processes.group import gather, shared_errors

SHOWN = 8
"""Differences that a message names."""
THREADS = "threads"
"""What begun.json calls the threads of every rank."""
NOT_COMPARED = {"search", "logging", "checkpoints", "micro_batch", "parallel", "compute"}
"""Settings that may change while a search goes on: they do not change a run's outcome but for rounding."""


@dataclass(frozen=True)
class Member:
    """One of the runs of a search."""

    name: str
    settings: FineTuning
    trains: bool = True
    """whether a model learns in it, rather than being scored as it is"""


def list_members(settings: FineTuning) -> list[Member]:
    """The runs that the settings ask for, those of the first seed first."""
    search = settings.search
    rates, batches, epochs = (
        given or (default,)
        for given, default in (
            (search.learning_rates, settings.learning_rate),
            (search.batches, settings.batch),
            (search.epochs, settings.epochs),
        )
    )
    members = []
    for number, batch, epoch, rate in product(range(search.seeds), batches, epochs, rates):
        seed = settings.seed + number
        parts = [f"lr{rate:g}", *[f"batch{batch}"] * (len(batches) > 1), *[f"epochs{epoch:g}"] * (len(epochs) > 1)]
        own = {"learning_rate": rate, "batch": batch, "epochs": epoch, "seed": seed}
        members.append(Member("-".join([*parts, f"seed{seed}"]), settings.model_copy(update=own)))
    return members


def what_decides(settings: FineTuning) -> dict[str, Any]:
    """The settings that a run's outcome depends on."""
    return {name: value for name, value in settings.model_dump(mode="json").items() if name not in NOT_COMPARED}


def require_same(task: Path, wanted: Mapping[str, dict[str, Any]]) -> None:
    """Refuses to go on in the folder of a task where a run was begun with another model, other data or other settings.

    `wanted` says what the runs depend on that are to be made, by name. Other runs, with which they will be compared,
    may differ in what a search varies, and in nothing else.
    """
    for folder in sorted(path.parent for path in task.glob(f"*/{BEGUN}")):
        begun = {name: value for name, value in _begun(folder).items() if name != THREADS}
        now = wanted.get(folder.name) or _in_place_of(begun, next(iter(wanted.values())))
        if changes := differences(begun, now):
            shown = [*changes[:SHOWN], *[f"and {len(changes) - SHOWN} more"] * (len(changes) > SHOWN)]
            raise UserError(
                "\n    ".join([f"{folder}: this run was begun otherwise:", *shown])
                + "\ncontinue it as it was begun, or name another folder with --out"
            )


def _in_place_of(begun: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What a wanted run depends on, with the values that another one has of what a search varies."""
    varied = {name: value for name, value in begun["settings"].items() if name in VARIED}
    return {**wanted, "settings": {**wanted["settings"], **varied}}


def _begun(folder: Path) -> dict[str, Any]:
    """What a run was begun with; nothing where it was not."""
    return read_json(folder / BEGUN) if (folder / BEGUN).exists() else {}


def begin(folder: Path, identity: dict[str, Any], settings: FineTuning, context: Context) -> None:
    """Notes what a run depends on. All ranks call it together.

    A run that goes on on as many ranks has the threads that it was begun with, unless the settings say how many: they
    decide how sums are rounded, so that it stays the run that it was.
    """
    threads = gather(torch.get_num_threads())
    with shared_errors():
        if context.world.rank == 0:
            noted = _begun(folder).get(THREADS, [])
            if len(noted) == len(threads) and not settings.compute.threads:
                threads = noted
            write_json(folder / BEGUN, {**identity, THREADS: threads})
    torch.set_num_threads(gather(threads)[0][context.world.rank])


def results_in(folder: Path) -> dict[str, Any] | None:
    """The results of a run; None while it has none."""
    return read_json(folder / RESULTS) if (folder / RESULTS).exists() else None


def results_of(task: Path) -> dict[str, dict[str, Any]]:
    """The results of the runs of a task that are done, by the names of their folders."""
    return {path.parent.name: read_json(path) for path in sorted(task.glob(f"*/{RESULTS}"))}


def best_of(runs: Mapping[str, dict[str, Any]]) -> str | None:
    """The name of the run with the best score, the first of equal ones; None where all have failed."""
    scored = [name for name, results in runs.items() if results["score"] is not None]
    return max(scored, key=lambda name: runs[name]["score"], default=None)


def remove_worse_models(task: Path) -> None:
    """Removes the models of runs that are done and worse than another one."""
    runs = results_of(task)
    for name in runs.keys() - {best_of(runs)}:
        shutil.rmtree(task / name / MODEL, ignore_errors=True)


def run_member(
    task: Task,
    member: Member,
    base: Base,
    folder: Path,
    identity: dict[str, Any],
    context: Context,
    epochs_after: float,
) -> dict[str, Any]:
    """Goes through one run, from where it was stopped, and writes its results; other runs of the task will go through
    so many epochs after it. All ranks call it together."""
    settings, leads = member.settings, context.world.rank == 0
    begin(folder, identity, settings, context)
    run = Run(task, base.shape_for(settings.dropout), base.weights_for(task), settings, folder, context, epochs_after)
    results: dict[str, Any] = {"run": member.name, "metric": task.metric, "score": None}
    results |= {"settings": what_decides(settings), "predicted": [*task.dev, *task.test]}
    try:
        state = run.train(partial(keep, base=base))
    except BrokenError as error:
        results |= {"failed": str(error)}
    else:
        results |= {"score": next(iter(state.scores.values()))[task.metric], "scores": state.scores}
        results |= {
            **state.certainty,
            "degenerate": state.degenerate,
            "steps": state.step,
            "seconds": round(state.seconds, 2),
        }
        results |= {"items_per_second": round(state.items / state.seconds, 2)}
        results |= {"dtype": name_dtype(run.engine.dtype), "ranks": context.world.size, "device": context.device.type}
    run.close()
    with shared_errors():
        if leads:
            write_json(folder / RESULTS, results)
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            for name in (MODEL, PREDICTIONS) if "failed" in results else ():
                shutil.rmtree(folder / name, ignore_errors=True)
    return results


def score_member(
    task: Task, member: Member, outputs: Outputs, folder: Path, identity: dict[str, Any], context: Context
) -> dict[str, Any]:
    """Writes the results of a run that trains nothing, of which all outputs are known. All ranks call it together."""
    results = {"run": member.name, "metric": task.metric, "settings": what_decides(member.settings)}
    results |= {"predicted": [*outputs]}
    with shared_errors():
        if context.world.rank == 0:
            write_json(folder / BEGUN, identity)
            results |= score(task, outputs, folder / PREDICTIONS)
            write_json(folder / RESULTS, results)
    return results


def keep(run: Run, outputs: Outputs, *, base: Base) -> None:
    """Writes what a run has learned: its predictions, and the model. All ranks call it together."""
    weights = run.task.scale.folded(dict(run.engine.weights()))
    with shared_errors():
        if run.context.world.rank == 0:
            for split, output in outputs.items():
                run.task.write_predictions(split, output, run.folder / PREDICTIONS)
            use = run.task.description(next(iter(outputs.values())))
            if run.settings.features.layers:  # transformers has no BiLSTM
                write_features(run, base, weights, use)
            else:
                base.write(run, weights, use)
