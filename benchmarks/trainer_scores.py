#!/usr/bin/env python3
"""Compares the scores of our fine-tuning with those of transformers' Trainer, over seeds, on a task of GLUE.

    python benchmarks/trainer_scores.py --task mrpc --model exported/mini --learning-rate 1e-4
    python benchmarks/trainer_scores.py --seeds 20

Both begin with the same folder of weights and have the same settings, in fp32. Each draws its own head, order and masks
of dropout by the seed; trainer_losses.py shows that else only warm-up differs, by a step. Sides take turns, and what is
found after each seed is kept.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.fine_tuners import Unscored, arguments, load_model, rows_of
from benchmarks.fine_tuning import make_model
from benchmarks.loss_sides import BATCH, CPU, alone
from benchmarks.measure import DATA, Keeper, results_file, run_command
from benchmarks.peer import hush, require
from benchmarks.reproduction.verdicts import compare
from benchmarks.tables import matrix, show
from benchmarks.trainer_losses import PEER
from data_prep.common.errors import UserError
from finetuning.inputs import Cutter
from finetuning.model.models import find_model
from finetuning.ragged import Ragged
from finetuning.running.base import Base
from finetuning.running.outputs import outputs_of
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.sentences import SentenceTask
from finetuning.tasks.task import Setup
from pretraining.engine.precision import set_arithmetic

OURS, THEIRS = "ours", "the Trainer's"
QUIET = ("--precision.dtype=fp32", "--logging.tensorboard=false", "--checkpoints.every=0")


@dataclass(frozen=True)
class TrainerScores:
    """Compares the scores of fine-tuning with those of transformers' Trainer, over seeds."""

    task: str = "rte"
    """A task of GLUE with classes and one dev split that is in the folder of the data."""
    model: Path | None = None
    """Folder of a BERT of transformers (default: one with fresh weights, which tell little)."""
    size: str = "tiny"
    """Its size, where none is given."""
    data: Path = DATA
    """Folder with glue/ and vocab.txt."""
    seeds: int = 10
    """How many seeds each side has."""
    epochs: float = 3.0
    """Epochs of a run, of 32 items a step."""
    learning_rate: float = 1e-4
    """Highest learning rate."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results, by task and hardware)."""

    def settings(self, seed: int) -> FineTuning:
        """The settings of the recipe of GLUE, which both sides follow."""
        given = {"batch": BATCH, "epochs": self.epochs, "learning_rate": self.learning_rate, "seed": seed}
        return load_settings(
            "glue", [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *QUIET]
        )


def our_score(task: SentenceTask, model: Path, settings: FineTuning) -> float:
    """What a model that we fine-tune scores on dev."""
    set_arithmetic(settings.precision, settings.compute, CPU)
    base = Base(find_model(str(model)))
    with alone() as context, tempfile.TemporaryDirectory() as folder:
        shape, weights = base.shape_for(settings.dropout), base.weights_for(task)
        run = Unscored(task, shape, weights, settings, Path(folder), context)
        run.train(lambda *_: None)
        outputs = outputs_of(run.engine, task.head.kind, task.dev, context)
        run.close()
    return task.score("dev", outputs["dev"])[task.metric]


def their_score(task: SentenceTask, model: Path, settings: FineTuning) -> float:
    """What a model that the Trainer fine-tunes scores on dev."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows: Any
    asked: Any
    rows, asked = (rows_of(items, task.head.kind) for items in (task.train, task.dev["dev"]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=load_model(model, task.head, settings),
            args=arguments(settings, Path(folder), "fp32", grouped=False, on_cpu=True),
            train_dataset=rows,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        logits: Any = trainer.predict(asked).predictions
    return task.score("dev", Ragged(logits, np.arange(1, len(logits) + 1)))[task.metric]


SIDES = {OURS: our_score, THEIRS: their_score}


def measure(wanted: TrainerScores, console: Console) -> None:
    """Lets both sides take turns, a seed after another, and keeps what is found after each."""
    require(*PEER)
    hush()
    if wanted.seeds < 2:
        raise UserError("--seeds: at least 2, since one tells nothing of chance")
    keeper = Keeper(
        "trainer_scores",
        ["torch", "deepspeed", *PEER],
        wanted.out or results_file(f"trainer-scores-{wanted.task}", with_gpu=False),
        with_gpu=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = wanted.model or make_model(wanted.size, wanted.data, Path(folder) / wanted.size)
        task = open_glue(
            wanted.task, wanted.data / "glue", Setup(Cutter(find_model(str(model)).vocabulary), wanted.settings(0))
        )
        if task.head.kind != "classes" or [*task.dev] != ["dev"]:
            raise UserError(f"--task {wanted.task}: has no classes, or more than one dev split")
        how = {"epochs": wanted.epochs, "learning_rate": wanted.learning_rate}
        about = {"task": wanted.task, "model": model.name, **how, "metric": task.metric}
        scores: dict[str, list[float]] = {side: [] for side in SIDES}
        for seed in range(wanted.seeds):
            for side, score_of in SIDES.items():
                scores[side].append(100 * score_of(task, model, wanted.settings(seed)))
            told = ", ".join(f"{side} {found[-1]:.1f}" for side, found in scores.items())
            console.print(f"seed {seed}: {told}", highlight=False)
            keeper.keep({**about, "scores": scores, "rows": summed(scores)})
    show(console, [matrix(f"{wanted.task}, {task.metric}", summed(scores))])
    console.print(f"kept in {keeper.path}")


def summed(scores: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Each side's mean and spread, and between what the difference lies."""
    rows: list[dict[str, Any]] = [
        {
            "side": side,
            "seeds": len(found),
            "mean": f"{statistics.fmean(found):.1f}",
            "spread": f"{statistics.stdev(found):.1f}" if len(found) > 1 else "",
            "from": f"{min(found):.1f}",
            "to": f"{max(found):.1f}",
        }
        for side, found in scores.items()
    ]
    found = compare(scores[OURS], scores[THEIRS])
    rows[0]["above the other"] = (
        "nobody knows: no spread, or one seed"
        if found is None
        else f"{found.difference:+.1f} ({found.low:+.1f} to {found.high:+.1f}), p = {found.p:.2f}"
    )
    return rows


if __name__ == "__main__":
    run_command(TrainerScores, measure)
