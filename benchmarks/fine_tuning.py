#!/usr/bin/env python3
"""Measures fine-tuning against transformers' Trainer: items a second in training and in prediction.

    python benchmarks/fine_tuning.py
    python benchmarks/fine_tuning.py --contests base-sst2-padded base-squad-dynamic

Both train the same model on the same items of real tasks (from the folder that CLOZE_DATA names; without it, sentences
of the demo corpus), with equal batches, dropout, AdamW and clipping. We pad nothing; the Trainer pads to the longest
sequence that a task allows, or to the longest of a batch with lengths grouped. It computes in bf16 by autocast, and on
a CPU in fp32 too. If it is not installed, we are measured alone. A turn is an epoch of some steps; ratios are medians.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks.contests import OURS, Turns, alternate
from benchmarks.measure import ResultsFile, describe_run, find_data_folder, run_command
from benchmarks.peer import find_missing_packages, pad_inputs, silence_transformers
from benchmarks.sides import Answer, SideSpec, open_sides
from benchmarks.tables import show_contest
from benchmarks.texts import choose_vocabulary, write_demo_task
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
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.architectures.weights import TaskHead
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.folders import write_folder
from pretraining.huggingface.weights import AUTO_CLASSES
from pretraining.objectives.declaration import build_model
from pretraining.processes.context import Context
from pretraining.processes.group import choose_device, connect, default_threads, disconnect
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch

SQUAD = "squad/train-v1.1_subset_44articles.json"
PEER = ("transformers", "accelerate")
"""Packages of the peer."""
Numbers = Literal["autocast", "fp32"]
"""The type of numbers of the Trainer: bf16 over weights in fp32, or fp32."""
FILES = {"sst2": "glue/SST-2", "cola": "glue/CoLA", "squad": SQUAD}
PADDINGS = ("padded", "dynamic")
DEMO = "demo"
"""Stands for a task on sentences of the demo corpus, in the format of SST-2."""
STEPS, GPU_STEPS = {"mini": 64, "small": 16}, 8
"""Steps of an epoch, so that a turn takes seconds: by the size of the model on a CPU; LEAST_STEPS for other sizes."""
LEAST_STEPS = 4


@dataclass(frozen=True)
class FineTuningSpeed:
    """Measures fine-tuning against transformers' Trainer."""

    contests: tuple[str, ...] = ()
    """SIZE-TASK-padded or SIZE-TASK-dynamic, such as mini-sst2-dynamic; earlier results of others stay (default: mini
    on all tasks in CLOZE_DATA, or else on the demo corpus)."""
    rounds: int = 5
    """Turns for the median."""
    out: Path | None = None
    """File for the results (default: in benchmarks/results)."""


@contextmanager
def open_context(device: torch.device) -> Iterator[Context]:
    """Opens the context of a run of one process."""
    world = World()
    connect(world, device)
    try:
        yield Context(world, device, Console(file=StringIO()), Control(world), Watch(world))
    finally:
        disconnect()


@dataclass(frozen=True)
class Exercise:
    """The work of all sides: epochs of training on some items, and predictions of them."""

    task: str
    """sst2, cola or squad."""
    model: Path
    data: Path
    steps: int
    """Steps of an epoch."""
    epochs: int
    dtype: str = "auto"

    @property
    def batch(self) -> int:
        """The usual batch of the task."""
        return 16 if self.task == "squad" else 32

    @property
    def width(self) -> int:
        """The usual width of padded sequences of the task."""
        return 384 if self.task == "squad" else 128

    def settings(self) -> FineTuning:
        """Returns the settings of the task's recipe, without logs or checkpoints of the run."""
        given = {"batch": self.batch, "epochs": float(self.epochs), "precision.dtype": f'"{self.dtype}"'}
        given |= {"logging.tensorboard": "false", "checkpoints.every": 0}
        recipe = "squad1" if self.task == "squad" else "glue"
        return load_settings(recipe, [f"--{name}={value}" for name, value in given.items()])

    def open(self) -> Task:
        """Opens the task, with the number of training items that the steps of an epoch take."""
        setup = Setup(Cutter(find_model(str(self.model)).vocabulary), self.settings())
        task: Task = (
            open_squad("1.1", self.data / SQUAD, None, setup)
            if self.task == "squad"
            else open_glue(self.task, self.data / "glue", setup)
        )
        wanted = self.steps * self.batch
        if wanted > len(task.train):
            raise UserError(f"{self.task} has {len(task.train)} items, and {wanted} are needed")
        task.train = ItemSubset(task.train, np.random.default_rng(0).permutation(len(task.train))[:wanted])
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
    """A run without scoring, since prediction has its own turns; `end_epoch` is called after each epoch."""

    end_epoch: Callable[[], Any] | None = None

    def score_where_due(self) -> None:
        """Scores nothing."""
        if self.end_epoch is not None and self.state.step and self.epoch.is_integer():
            self.end_epoch()


@dataclass(frozen=True)
class OurFineTuning:
    """Our fine-tuning: an epoch a turn, and after the last epoch a prediction of the training items a turn."""

    exercise: Exercise

    def take_turns(self, answer: Answer) -> None:
        """Trains for all epochs, then predicts repeatedly."""
        settings, task, device = self.exercise.settings(), self.exercise.open(), choose_device("auto", World())
        torch.set_num_threads(default_threads(World()))
        set_arithmetic(settings.precision, settings.compute, device)
        base = Base(find_model(str(self.exercise.model)))
        with open_context(device) as context, tempfile.TemporaryDirectory() as folder:
            run = UnscoredTuner(Run(task, settings, Path(folder)), base, context)
            run.end_epoch = answer
            answer()
            run.train()
            while True:
                compute_outputs(run.engine, task.head.kind, {"train": task.train}, context)
                answer()


@dataclass(frozen=True)
class TheirFineTuning:
    """transformers' Trainer in the same turns. It pads to `width`, or to the longest of a batch, of like lengths."""

    numbers: Numbers
    width: int
    exercise: Exercise

    def take_turns(self, answer: Answer) -> None:
        """Trains for all epochs, then predicts repeatedly."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        silence_transformers()
        import transformers

        class EndsTurns(transformers.TrainerCallback):  # type: ignore[misc]
            """Ends a turn with the last step of an epoch."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
                if state.global_step % steps == 0:
                    answer()

        steps, settings, task = self.exercise.steps, self.exercise.settings(), self.exercise.open()
        torch.set_num_threads(default_threads(World()))
        rows: Any = encode_rows(task.train, task.head.kind, self.width)
        with tempfile.TemporaryDirectory() as folder:
            arguments = build_arguments(settings, Path(folder), self.numbers, grouped=not self.width)
            trainer = make_trainer(transformers.Trainer, self.exercise.model, task.head, settings, arguments, rows)
            if self.width:
                trainer.data_collator = transformers.default_data_collator
            trainer.add_callback(EndsTurns())
            answer()
            trainer.train()
            while True:
                trainer.predict(rows)
                answer()


def make_trainer(kind: Any, folder: Path, head: TaskHead, settings: FineTuning, arguments: Any, rows: Any) -> Any:
    """Creates a quiet Trainer of this kind for a model folder, and rows of which it pads each batch to its longest."""
    import transformers

    given: dict[str, Any] = {
        "hidden_dropout_prob": settings.dropout.hidden,
        "classifier_dropout": settings.dropout.hidden,
        "attention_probs_dropout_prob": settings.dropout.attention,
        "num_labels": head.outputs if head.kind in ("classes", "labels", "score", "tags") else None,
    }
    given = {name: value for name, value in given.items() if value is not None}  # else that of the folder
    transformers.set_seed(settings.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = kind(
        model=getattr(transformers, AUTO_CLASSES[head.kind]).from_pretrained(folder, dtype=torch.float32, **given),
        args=arguments,
        train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


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
        lr_scheduler_type="linear",
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


def make_model(size: str, folder: Path) -> Path:
    """Writes a transformers folder with fresh weights and the published vocabulary."""
    vocabulary = choose_vocabulary()
    vocabulary.write(folder.with_name("vocabulary"))
    shape = make_shape(size, len(vocabulary))
    weights = build_model(shape).initialize(0).state_dict()
    write_folder(folder, shape, weights, folder.with_name("vocabulary"), "fresh weights\n")
    return folder


def compete(numbers: Numbers, width: int, exercise: Exercise) -> dict[str, Turns]:
    """Lets all sides take turns in training and in prediction; the first turns do not count."""
    kinds = {OURS: SideSpec(OurFineTuning, small_steps=True)}
    if not find_missing_packages(*PEER):
        kinds[PEER[0]] = SideSpec(partial(TheirFineTuning, numbers, width), prepared=False)
    with open_sides(kinds, exercise) as sides:

        def take_turns(method: str) -> Turns:
            return alternate({name: partial(side.ask, method) for name, side in sides.items()}, exercise.epochs - 1, 1)

        return {"training": take_turns("train"), "prediction": take_turns("predict")}


def run_contest(padded: bool, exercise: Exercise) -> dict[str, Any]:
    """Runs a contest against the Trainer with each type of numbers: on a GPU nobody trains in fp32."""
    numbers: tuple[Numbers, ...] = ("autocast", "fp32")
    if torch.cuda.is_available() or find_missing_packages(*PEER):
        numbers = numbers[:1]
    width = exercise.width if padded else 0
    against = {each: summarise(compete(each, width, exercise), exercise) for each in numbers}
    return {"batch": exercise.batch, "steps": exercise.steps, "against": against}


def summarise(taken: Mapping[str, Turns], exercise: Exercise) -> dict[str, Any]:
    """Returns items a second of both sides, and how many times as fast we are."""
    items, found = exercise.steps * exercise.batch, dict[str, dict[str, Any]]()
    for what, turns in taken.items():
        medians = {side: turns.summarise_side(side)["median"] for side in turns.seconds}
        found[what] = {f"{side}_items_per_second": round(items / each, 1) for side, each in medians.items()}
        found[what] |= {"times_as_fast": turns.compute_ratio(PEER[0], OURS)} if PEER[0] in turns.seconds else {}
    return found


def measure(settings: FineTuningSpeed, console: Console) -> None:
    """Runs the contests, and writes the results after each, since they take minutes."""
    absent = find_missing_packages(*PEER)
    keeper = ResultsFile("finetuning", ["torch", "deepspeed", *PEER], settings.out)
    models = keeper.earlier.get("models", {})
    if settings.rounds < 1:
        raise UserError(f"--rounds {settings.rounds}: at least 1")
    contests = find_contests(settings.contests, console)
    if absent:
        console.print(f"not installed: {', '.join(absent)}; nothing is compared with")
    device = choose_device("auto", World())
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(folder) / "data"
        if any(task == DEMO for _, task, _ in contests):
            write_demo_task(demo)
        for size, task, how in contests:
            model = Path(folder) / size
            if not model.exists():
                make_model(size, model)
            found = models.setdefault(size, {"contests": {}})
            steps = GPU_STEPS if device.type == "cuda" else STEPS.get(size, LEAST_STEPS)
            name = f"{task}-{how}" + ", alone" * bool(absent)  # so that it replaces no ratio
            own, data = ("sst2", demo) if task == DEMO else (task, find_data_folder().resolve())
            contest = run_contest(how == "padded", Exercise(own, model, data, steps, 1 + settings.rounds))
            found["contests"][name] = {**contest, **describe_run()}
            written = keeper.keep({"models": models})
            show_contest(console, f"{size}: {name}", found["contests"][name])
    console.print(f"kept in {written}")


def find_contests(names: Sequence[str], console: Console) -> list[tuple[str, ...]]:
    """Returns size, task and padding of the requested contests, or of all of mini with data; without any data, of those
    on the demo corpus."""
    data = find_data_folder()
    tasks = [task for task, file in FILES.items() if (data / file).exists()]
    if not names and not tasks:
        console.print(f"{data} has no tasks: sentences of the demo corpus are taken (real ones: CLOZE_DATA)")
    found = [tuple(name.split("-")) for name in names]
    for name, parts in zip(names, found, strict=True):
        if len(parts) != 3 or parts[0] not in BERT.sizes or parts[1] not in (*tasks, DEMO) or parts[2] not in PADDINGS:
            form = f"SIZE-TASK-padded or SIZE-TASK-dynamic, such as mini-{DEMO}-padded"
            there = ", ".join((*tasks, DEMO))
            raise UserError(f"{name}: no contest; give {form}; {data}, which CLOZE_DATA names, has {there}")
    return found or [("mini", task, how) for task in tasks or (DEMO,) for how in PADDINGS]


if __name__ == "__main__":
    run_command(FineTuningSpeed, measure)
