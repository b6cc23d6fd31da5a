"""Sides of the benchmark of fine-tuning: each trains and predicts in a process of its own, in its turn.

A turn is an epoch of training, or one prediction of the same items, so that all do the same work in every turn. The
peer is transformers' Trainer, on the same items, from the same model folder, with our settings. Its items are cut into
pieces before it begins, as its users do; that time counts for nobody else.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks.peer import hush, pad_inputs
from data_prep.common.arrays import Array
from data_prep.common.launchers import World
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.model.models import find_model
from finetuning.running.base import Base
from finetuning.running.loop import Tuner
from finetuning.running.outputs import outputs_of
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.weights import TaskHead
from pretraining.processes.context import Context
from pretraining.processes.group import choose_device, connect, default_threads
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

SQUAD = "squad/train-v1.1_subset_44articles.json"
Numbers = Literal["autocast", "fp32"]
"""What the Trainer computes in: bf16 over weights in fp32, or fp32."""


@dataclass(frozen=True)
class Exercise:
    """What all sides do: epochs of training on some items, and predictions of them."""

    task: str
    """sst2, cola or squad."""
    model: Path
    data: Path
    batch: int
    steps: int
    """Steps of an epoch."""
    epochs: int
    dtype: str = "auto"

    def settings(self) -> FineTuning:
        """The settings of the task's recipe, with nothing kept of the run."""
        given = {"batch": self.batch, "epochs": float(self.epochs), "precision.dtype": f'"{self.dtype}"'}
        quiet = {"logging.tensorboard": "false", "checkpoints.every": 0}
        overrides = [f"--{name}={value}" for name, value in {**given, **quiet}.items()]
        return load_settings("squad1" if self.task == "squad" else "glue", overrides)

    def open(self) -> Task:
        """The task, with as many of its training items as the steps of an epoch take."""
        cutter, settings = Cutter(find_model(str(self.model)).vocabulary), self.settings()
        task: Task = (
            open_squad("1.1", self.data / SQUAD, None, Setup(cutter, settings), held_out=0.1)
            if self.task == "squad"
            else open_glue(self.task, self.data / "glue", Setup(cutter, settings))
        )
        order = np.random.default_rng(0).permutation(len(task.train))
        task.train = Some(task.train, order[: self.steps * self.batch])
        return task


@dataclass(frozen=True)
class Some:
    """Some of the items of a split."""

    items: Items
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, numbers: Array) -> Encoded:
        """The model's input of these items."""
        return self.items.encode(self.numbers[numbers])


class Unscored(Tuner):
    """A run that scores nothing: prediction has turns of its own."""

    def score_where_due(self) -> None:
        """Does nothing."""


class OurFineTuning:
    """Our fine-tuning, an epoch in a turn."""

    def __init__(self, exercise: Exercise, world: World | None = None) -> None:
        """Connects the ranks of the world, which is this process alone where none is given."""
        world, settings = world or World(), exercise.settings()
        device = choose_device("auto", world)
        connect(world, device)
        torch.set_num_threads(default_threads(world))
        set_arithmetic(settings.precision, settings.compute, device)
        self.task, base = exercise.open(), Base(find_model(str(exercise.model)))
        self.context = Context(world, device, Console(file=StringIO()), Control(world), Watch(world))
        shape, weights = base.shape_for(settings.dropout), base.weights_for(self.task)
        self.folder = tempfile.TemporaryDirectory()
        self.run = Unscored(self.task, shape, weights, settings, Path(self.folder.name), self.context)
        self.opened = ExitStack()
        self.opened.enter_context(self.run.log)
        self.run.meter.begin()
        self.ahead = self.run.batches.iterate(0)

    def train(self) -> None:
        """Trains for an epoch."""
        for _ in range(self.run.batches.steps_per_epoch):
            self.run.show_progress()
            self.run.step(*next(self.ahead))
            self.run.after_step()

    def predict(self) -> None:
        """Predicts the items that it trains on."""
        outputs_of(self.run.engine, self.task.head.kind, {"train": self.task.train}, self.context)


class InTurns:
    """A loop of training as a side of a contest: a thread goes through it, and stands still between turns."""

    def __init__(self, work: Callable[[InTurns, Path], None]) -> None:
        self._begin, self._end = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._go_through, args=(work,), daemon=True).start()
        self._wait()

    def train(self) -> None:
        """Lets it go on for a turn."""
        self._begin.release()
        self._wait()

    predict = train
    """The loop decides whether a turn trains or predicts."""

    def next(self) -> None:
        """Ends a turn, and waits for the next one; the loop calls it, and once when it is ready for the first."""
        self._end.release()
        self._begin.acquire()

    def _wait(self) -> None:
        self._end.acquire()
        if self._error is not None:
            raise self._error

    def _go_through(self, work: Callable[[InTurns, Path], None]) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                work(self, Path(folder))
        except BaseException as error:
            self._error = error
            self._end.release()


def theirs(numbers: Numbers, width: int, exercise: Exercise) -> InTurns:
    """transformers' Trainer, which pads to a width, or to the longest of a batch with lengths grouped."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hush()
    import transformers

    def train(turns: InTurns, folder: Path) -> None:
        class EndsTurns(transformers.TrainerCallback):
            """Ends a turn with the last step of an epoch."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                if state.global_step % exercise.steps == 0:
                    turns.next()

        torch.set_num_threads(default_threads(World()))
        settings, task = exercise.settings(), exercise.open()
        rows: Any = rows_of(task.train, task.head.kind, width)
        tokenizer = transformers.AutoTokenizer.from_pretrained(exercise.model)
        collator: Any = transformers.default_data_collator if width else transformers.DataCollatorWithPadding(tokenizer)
        trainer = transformers.Trainer(
            model=load_model(exercise.model, task.head, settings),
            args=arguments(settings, folder, numbers, grouped=not width),
            train_dataset=rows,
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[EndsTurns()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        turns.next()
        trainer.train()
        while True:
            trainer.predict(rows)
            turns.next()

    return InTurns(train)


def load_model(folder: Path, head: TaskHead, settings: FineTuning) -> Any:
    """A model of transformers for a task, with the weights of the folder."""
    import transformers

    dropout, attention = settings.dropout.hidden, settings.dropout.attention
    chosen = {
        "num_labels": head.outputs if head.kind in ("classes", "labels", "score", "tags") else None,
        "hidden_dropout_prob": dropout,
        "classifier_dropout": dropout,
        "attention_probs_dropout_prob": attention,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    transformers.set_seed(settings.seed)
    return getattr(transformers, head.architecture).from_pretrained(folder, dtype=torch.float32, **given)


def arguments(settings: FineTuning, folder: Path, numbers: Numbers, grouped: bool, on_cpu: bool = False) -> Any:
    """Our settings as the Trainer takes them; it computes on a GPU where there is one, unless on_cpu says otherwise."""
    import transformers

    optimizer = settings.optimizer
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        num_train_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        lr_scheduler_type="linear" if settings.decay == "linear" else "constant_with_warmup",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        seed=settings.seed,
        train_sampling_strategy="group_by_length" if grouped else "random",
        bf16=numbers == "autocast",
        use_cpu=on_cpu or not torch.cuda.is_available(),
        logging_steps=settings.logging.every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def rows_of(items: Items, kind: str, width: int = 0) -> list[dict[str, Any]]:
    """The items as rows of a dataset; padded to a `width`, or as long as they are."""
    encoded = items.encode(np.arange(len(items)))
    pieces, second = encoded.sequences
    rows: list[dict[str, Any]] = []
    for number, begins in enumerate(second.tolist()):
        row = {name: table[0] for name, table in pad_inputs([pieces.row(number)], width).items()}
        row["token_type_ids"] = np.where(np.arange(len(row["input_ids"])) >= begins, row["attention_mask"], 0)
        rows.append({name: values.tolist() for name, values in row.items()})
    labels = [] if encoded.labels is None else encoded.labels.values.tolist()
    names = ("start_positions", "end_positions") if kind == "spans" else ("labels",)
    for place, label in enumerate(labels):
        rows[place // len(names)][names[place % len(names)]] = label
    return rows
