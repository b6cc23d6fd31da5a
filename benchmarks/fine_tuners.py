"""Sides of the fine-tuning benchmark, which train and predict in turns, each in a process of its own.

A turn is an epoch of training, or one prediction of the same items, so that all do the same work in every turn. The
peer is transformers' Trainer, on the same items, from the same model folder, with our settings. Its items are cut into
pieces beforehand, as its users do, which does not count.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks.peer import pad_inputs, silence_transformers
from benchmarks.sides import Calls
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.running.base import Base, Run, find_model
from finetuning.running.loop import Tuner
from finetuning.running.outputs import compute_outputs
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task
from pretraining.architectures.weights import TaskHead
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.weights import AUTO_CLASSES
from pretraining.processes.context import Context
from pretraining.processes.group import choose_device, connect, default_threads
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

SQUAD = "squad/train-v1.1_subset_44articles.json"
PEER = ("transformers", "accelerate")
"""Packages of the peer."""
Numbers = Literal["autocast", "fp32"]
"""The type of numbers of the Trainer: bf16 over weights in fp32, or fp32."""


@dataclass(frozen=True)
class Exercise:
    """The work of all sides: epochs of training on some items, and predictions of them."""

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
        """Returns the settings of the task's recipe, without logs or checkpoints of the run."""
        given = {"batch": self.batch, "epochs": float(self.epochs), "precision.dtype": f'"{self.dtype}"'}
        quiet = {"logging.tensorboard": "false", "checkpoints.every": 0}
        overrides = [f"--{name}={value}" for name, value in {**given, **quiet}.items()]
        return load_settings("squad1" if self.task == "squad" else "glue", overrides)

    def open(self) -> Task:
        """Opens the task, with the number of training items that the steps of an epoch take."""
        cutter, settings = Cutter(find_model(str(self.model)).vocabulary), self.settings()
        task: Task = (
            open_squad("1.1", self.data / SQUAD, None, Setup(cutter, settings), held_out=0.1)
            if self.task == "squad"
            else open_glue(self.task, self.data / "glue", Setup(cutter, settings))
        )
        if (wanted := self.steps * self.batch) > len(task.train):
            raise UserError(f"--steps {self.steps}: {self.task} has {len(task.train)} items, and {wanted} are needed")
        order = np.random.default_rng(0).permutation(len(task.train))
        task.train = ItemSubset(task.train, order[:wanted])
        return task


@dataclass(frozen=True)
class ItemSubset:
    """A subset of the items of a split."""

    items: Items
    numbers: Array

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, numbers: Array) -> Encoded:
        """The model's input of these items."""
        return self.items.encode(self.numbers[numbers])


class UnscoredTuner(Tuner):
    """A run without scoring, since prediction has its own turns."""

    def score_where_due(self) -> None:
        """Does nothing."""


class OurFineTuning:
    """Our fine-tuning, an epoch a turn."""

    def __init__(self, exercise: Exercise) -> None:
        world, settings = World(), exercise.settings()
        device = choose_device("auto", world)
        connect(world, device)
        torch.set_num_threads(default_threads(world))
        set_arithmetic(settings.precision, settings.compute, device)
        self.task, base = exercise.open(), Base(find_model(str(exercise.model)))
        self.context = Context(world, device, Console(file=StringIO()), Control(world), Watch(world))
        self.folder = tempfile.TemporaryDirectory()
        self.run = UnscoredTuner(Run(self.task, settings, Path(self.folder.name)), base, self.context)
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
        compute_outputs(self.run.engine, self.task.head.kind, {"train": self.task.train}, self.context)


class TheirFineTuning:
    """transformers' Trainer: an epoch a turn, and after the last epoch a prediction a turn. It pads to `width`, or to
    the longest of a batch with lengths grouped."""

    def __init__(self, numbers: Numbers, width: int, exercise: Exercise) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        silence_transformers()
        self.numbers, self.width, self.exercise = numbers, width, exercise

    def take_turns(self, calls: Calls) -> None:
        """Trains for all epochs, then predicts the training items repeatedly."""
        with tempfile.TemporaryDirectory() as folder:
            trainer, rows = self._prepare(calls, Path(folder))
            calls.next()
            trainer.train()
            while True:
                trainer.predict(rows)
                calls.next()

    def _prepare(self, calls: Calls, folder: Path) -> tuple[Any, Any]:
        """Creates the Trainer, and the rows of its dataset."""
        import transformers

        steps, settings, task = self.exercise.steps, self.exercise.settings(), self.exercise.open()

        class EndsTurns(transformers.TrainerCallback):
            """Ends a turn with the last step of an epoch."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                if state.global_step % steps == 0:
                    calls.next()

        torch.set_num_threads(default_threads(World()))
        rows: Any = encode_rows(task.train, task.head.kind, self.width)
        told = build_arguments(settings, folder, self.numbers, grouped=not self.width)
        trainer = make_trainer(transformers.Trainer, self.exercise.model, task.head, settings, told, rows)
        if self.width:
            trainer.data_collator = transformers.default_data_collator
        trainer.add_callback(EndsTurns())
        return trainer, rows


def make_trainer(kind: Any, model: Path, head: TaskHead, settings: FineTuning, told: Any, rows: Any) -> Any:
    """Creates a quiet Trainer of this kind for a model folder, and rows of which it pads each batch to its longest."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    trainer = kind(
        model=load_model(model, head, settings),
        args=told,
        train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def load_model(folder: Path, head: TaskHead, settings: FineTuning) -> Any:
    """Loads a transformers model for a task, with the weights of a folder."""
    import transformers

    dropout = settings.dropout
    given: dict[str, Any] = dict.fromkeys(("hidden_dropout_prob", "classifier_dropout"), dropout.hidden)
    given["attention_probs_dropout_prob"] = dropout.attention
    given = {name: share for name, share in given.items() if share is not None}  # else that of the folder
    if head.kind in ("classes", "labels", "score", "tags"):
        given["num_labels"] = head.outputs
    transformers.set_seed(settings.seed)
    return getattr(transformers, AUTO_CLASSES[head.kind]).from_pretrained(folder, dtype=torch.float32, **given)


def build_arguments(settings: FineTuning, folder: Path, numbers: Numbers, grouped: bool, on_cpu: bool = False) -> Any:
    """Converts our settings to arguments of the Trainer. It uses a GPU if there is one, unless `on_cpu` is set."""
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


def encode_rows(items: Items, kind: str, width: int = 0) -> list[dict[str, Any]]:
    """Converts items to rows of a dataset, padded to `width`; not padded if it is 0."""
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
