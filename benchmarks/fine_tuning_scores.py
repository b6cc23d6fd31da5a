#!/usr/bin/env python3
"""Compares what a model scores on dev of small tasks when we fine-tune it, and when transformers' Trainer does.

    python benchmarks/fine_tuning_scores.py --model minilm/
    python benchmarks/fine_tuning_scores.py --model runs/mini/export --tasks rte --seeds 3

Both begin with the same folder of transformers and train by the same settings in fp32; each draws its own head, order
and dropout for each seed. Seeds that were scored before are kept. Beside the means stands their difference with its
standard error: where both do the same, two of three differences are within it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import tempfile
from dataclasses import dataclass
from math import hypot
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.fine_tuning import (
    PEER,
    UnscoredTuner,
    build_arguments,
    encode_rows,
    load_quiet_settings,
    make_trainer,
    open_context,
)
from benchmarks.measure import DATA, ResultsFile, describe_run, run_command
from benchmarks.peer import require_packages, silence_transformers
from benchmarks.tables import show, summarise_results
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from finetuning.inputs import Cutter, Ragged
from finetuning.running.base import Base, Run, find_model
from finetuning.running.outputs import compute_outputs
from finetuning.settings import FineTuning
from finetuning.tasks.glue import open_glue
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.task import Setup
from pretraining.engine.precision import set_arithmetic
from pretraining.model.batch import CPU
from pretraining.processes.group import default_threads

OURS, THEIRS = "Cloze", "Trainer"
HOW = {"learning_rate": 1e-4, "epochs": 3.0}
"""The settings of both sides, besides those of the recipe of GLUE."""


@dataclass(frozen=True)
class FineTuningScores:
    """Compares the scores of our fine-tuning with those of transformers' Trainer."""

    model: Path
    """Folder of a transformers BERT."""
    tasks: tuple[str, ...] = ("rte", "mrpc")
    """Tasks of GLUE."""
    data: Path = DATA
    """Folder with glue/."""
    seeds: int = 10
    """Fine-tunings of each task on each side."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results)."""


def load_shared_settings(seed: int) -> FineTuning:
    """Loads the settings that both sides follow."""
    return load_quiet_settings("glue", **HOW, seed=seed, **{"precision.dtype": '"fp32"'})


def open_task(name: str, data: Path, model: Path, settings: FineTuning) -> SentenceTask:
    """Opens a task of GLUE in the pieces of the model's vocabulary."""
    return open_glue(name, data / "glue", Setup(Cutter(find_model(str(model)).vocabulary), settings))


def score_ours(task: SentenceTask, model: Path, settings: FineTuning) -> float:
    """Fine-tunes a model by our loop; returns its score on dev."""
    set_arithmetic(settings.precision, settings.compute, CPU)
    base = Base(find_model(str(model)))
    with open_context(CPU) as context, tempfile.TemporaryDirectory() as folder:
        run = UnscoredTuner(Run(task, settings, Path(folder)), base, context)
        run.train()
        outputs = compute_outputs(run.engine, task.head.kind, task.dev, context)
        run.close()
    return task.score("dev", outputs["dev"])[task.metric]


def standardize_labels(task: SentenceTask, rows: list[dict[str, Any]]) -> None:
    """Puts the labels of a task of numbers on the scale on which we train; the metrics are correlations."""
    for row in rows if task.head.kind == "score" else ():
        row["labels"] = float(task.scale.standardize(torch.tensor(row["labels"])))


def score_theirs(task: SentenceTask, model: Path, settings: FineTuning) -> float:
    """Fine-tunes a model by the Trainer; returns its score on dev."""
    import transformers

    rows, asked = (encode_rows(items, task.head.kind) for items in (task.train, task.dev["dev"]))
    standardize_labels(task, rows)
    with tempfile.TemporaryDirectory() as folder:
        told = build_arguments(settings, Path(folder), "fp32", grouped=False, on_cpu=True)
        trainer = make_trainer(transformers.Trainer, model, task.head, settings, told, rows)
        trainer.train()
        logits: Any = trainer.predict(asked).predictions
    return task.score("dev", Ragged(logits, np.arange(1, len(logits) + 1)))[task.metric]


def compare(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Returns the means of scores, their difference, and its standard error if there are several."""
    found = {"our_mean": mean(ours), "their_mean": mean(theirs), "difference": mean(ours) - mean(theirs)}
    if min(len(ours), len(theirs)) > 1:
        found["standard_error"] = hypot(*(stdev(scores) / len(scores) ** 0.5 for scores in (ours, theirs)))
    return found


def measure(wanted: FineTuningScores, console: Console) -> None:
    """Fine-tunes by both sides in turns, and writes the results after each seed, since one takes minutes."""
    require_packages(*PEER)
    if wanted.seeds < 1:
        raise UserError(f"--seeds {wanted.seeds}: at least 1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    silence_transformers()
    torch.set_num_threads(default_threads(World()))
    keeper = ResultsFile("fine_tuning_scores", ["torch", "deepspeed", *PEER], wanted.out, with_gpu=False)
    tasks: dict[str, Any] = keeper.earlier.get("tasks", {})
    checksum = Base(find_model(str(wanted.model))).identity["checksum"]
    how = {**HOW, "checksum": checksum}
    for name in wanted.tasks:  # before any is trained
        if name in tasks and not how.items() <= tasks[name].items():
            raise UserError(f"{keeper.path}: has {name} of another model or settings; give another file as --out")
    for name in wanted.tasks:
        task = open_task(name, wanted.data, wanted.model, load_shared_settings(0))
        scores = tasks.get(name, {}).get("scores", {})
        for seed in range(wanted.seeds):
            settings, own = load_shared_settings(seed), scores.setdefault(str(seed), {})
            for side, score in ((OURS, score_ours), (THEIRS, score_theirs)):
                if side not in own:
                    own[side] = round(score(task, wanted.model, settings), 4)
            console.print(f"{name}, seed {seed}: {task.metric} {own}", markup=False)
            compared = compare(*([each[side] for each in scores.values()] for side in (OURS, THEIRS)))
            about = {"model": wanted.model.resolve().name, "metric": task.metric}
            tasks[name] = {**how, **about, "scores": scores, **compared, **describe_run()}
            written = keeper.keep({"tasks": tasks})
    show(console, summarise_results({"benchmark": "fine_tuning_scores", "tasks": tasks}))
    console.print(f"kept in {written}", markup=False)


if __name__ == "__main__":
    run_command(FineTuningScores, measure)
