"""Sides of the contests of fine-tuning: our loop, and transformers' Trainer with the same items and settings. For
embeddings sentence-transformers' trainer, and both ways to compute the vectors of sentences."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks.measure import ROOT, find_data_folder
from benchmarks.peer import pad_inputs, silence_transformers
from benchmarks.sides import Answer
from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from data_prep.readers.reader import Problems
from data_prep.readers.sources import find_files
from data_prep.readers.text_pairs import TASK, write_pairs
from finetuning.inputs import Cutter, Encoded, Items
from finetuning.running.base import Base, Run, find_model
from finetuning.running.loop import Tuner
from finetuning.running.outputs import compute_outputs
from finetuning.settings import FineTuning, load_settings
from finetuning.tasks.glue import open_glue
from finetuning.tasks.own import open_own
from finetuning.tasks.squad import open_squad
from finetuning.tasks.task import Setup, Task
from pretraining.architectures.weights import TaskHead
from pretraining.engine.precision import set_arithmetic
from pretraining.huggingface.weights import AUTO_CLASSES
from pretraining.processes.context import Context
from pretraining.processes.group import choose_device, connect, default_threads, disconnect
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch
from pretraining.scoring.embedding import Embedder

SQUAD = "squad/train-v1.1_subset_44articles.json"
PEER = ("transformers", "accelerate")
"""Packages of the peer."""
Numbers = Literal["autocast", "fp32"]
"""The type of numbers of the Trainer: bf16 over weights in fp32, or fp32."""

MINILM = ROOT / "build" / "all-MiniLM-L6-v2"
"""Folder of sentence-transformers' model, which takes part where it is there."""
PAIRS_PEER = ("sentence_transformers", "datasets", "accelerate")
"""Packages of the peer of embeddings."""
DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "autocast": torch.bfloat16}
TOGETHER = 32
"""Sentences of a batch of the peer, its usual number."""


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
    """sst2, cola, squad, or pairs of titles and passages, as pairs.py makes them."""
    model: Path
    data: Path
    steps: int
    """Steps of an epoch."""
    epochs: int
    dtype: str = "auto"

    @property
    def batch(self) -> int:
        """The usual batch of the task."""
        return {"squad": 16, "pairs": 64}.get(self.task, 32)

    @property
    def width(self) -> int:
        """The usual width of padded sequences of the task."""
        return 384 if self.task == "squad" else 128

    def settings(self) -> FineTuning:
        """Returns the settings of the task's recipe, without logs or checkpoints of the run."""
        given = {"batch": self.batch, "epochs": float(self.epochs), "precision.dtype": f'"{self.dtype}"'}
        given |= {"logging.tensorboard": "false", "checkpoints.every": 0}
        recipes = {"squad": "squad1", "pairs": "embeddings"}
        return load_settings(recipes.get(self.task, "glue"), [f"--{name}={value}" for name, value in given.items()])

    def find(self, setup: Setup) -> Task:
        """Opens the task with all of its items."""
        if self.task == "squad":
            return open_squad("1.1", self.data / SQUAD, None, setup)
        if self.task == "pairs":
            return open_own(self.data / TASK, setup)
        return open_glue(self.task, self.data / "glue", setup)

    def open(self) -> Task:
        """Opens the task, with the number of training items that the steps of an epoch take."""
        task = self.find(Setup(Cutter(find_model(str(self.model)).vocabulary), self.settings()))
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

        steps, settings, task = self.exercise.steps, self.exercise.settings(), self.exercise.open()
        torch.set_num_threads(default_threads(World()))
        rows: Any = encode_rows(task.train, task.head.kind, self.width)
        with tempfile.TemporaryDirectory() as folder:
            arguments = build_arguments(settings, Path(folder), self.numbers, grouped=not self.width)
            trainer = make_trainer(transformers.Trainer, self.exercise.model, task.head, settings, arguments, rows)
            if self.width:
                trainer.data_collator = transformers.default_data_collator
            run_epochs(trainer, steps, answer)
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


def run_epochs(trainer: Any, steps: int, answer: Answer) -> None:
    """Runs a Trainer, of which each epoch of so many steps is a turn."""
    import transformers

    class EndsTurns(transformers.TrainerCallback):  # type: ignore[misc]
        """Ends a turn with the last step of an epoch."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step % steps == 0:
                answer()

    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(EndsTurns())
    answer()
    trainer.train()


def build_arguments(
    settings: FineTuning,
    folder: Path,
    numbers: Numbers,
    grouped: bool,
    on_cpu: bool = False,
    kind: Any = None,
    **more: Any,
) -> Any:
    """Converts our settings to arguments of the Trainer, or of another `kind`. It uses a GPU if there is one, unless
    `on_cpu` is set."""
    import transformers

    optimizer = settings.optimizer
    return (kind or transformers.TrainingArguments)(
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
        **more,
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


def write_pair_task(folder: Path) -> Path:
    """Writes a task of pairs of text in the folder that CLOZE_DATA names, or of the demo corpus; returns its folder."""
    text = find_data_folder() / "wiki" / "AA"
    problems = Problems("skip")
    write_pairs(folder, find_files([str(text) if text.is_dir() else "demo"], problems=problems), problems)
    return folder


@dataclass(frozen=True)
class TheirEmbeddings:
    """sentence-transformers' trainer with its loss of in-batch negatives, and batches of like lengths."""

    numbers: Numbers
    exercise: Exercise

    def take_turns(self, answer: Answer) -> None:
        """Trains for all epochs."""
        silence_transformers()
        from datasets import Dataset
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
        from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

        steps, settings, task = self.exercise.steps, self.exercise.settings(), self.exercise.open()
        torch.set_num_threads(default_threads(World()))
        chosen: Any = task.train
        texts = [[column[number] for number in chosen.numbers] for column in chosen.items.texts]
        lengths = chosen.items.encode(chosen.numbers).sequences.pieces.lengths.reshape(-1, 2).sum(1).tolist()

        class Sampler(LengthGroupedSampler):  # type: ignore[misc]
            """Groups the lengths of a whole epoch, which is too short for its own rule."""

            def __iter__(self) -> Iterator[int]:
                return iter(get_length_grouped_indices(lengths, self.batch_size, steps))

        def group_lengths(_: Any, batch_size: int, drop_last: bool, **__: Any) -> Any:
            sampler = Sampler(batch_size, lengths=lengths)
            return DefaultBatchSampler(sampler, batch_size=batch_size, drop_last=drop_last)

        model = SentenceTransformer(str(self.exercise.model))
        model.max_seq_length = settings.length
        loss = losses.MultipleNegativesRankingLoss(model, scale=1 / settings.embeddings.temperature)
        with tempfile.TemporaryDirectory() as folder:
            more: dict[str, Any] = {"kind": Arguments, "batch_sampler": group_lengths}
            arguments = build_arguments(settings, Path(folder), self.numbers, grouped=False, **more)
            rows = Dataset.from_dict(dict(zip(("question", "passage"), texts, strict=True)))
            trainer = SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss)
            run_epochs(trainer, steps, answer)


def load_ours(numbers: Numbers, model: Path, sentences: Sequence[str]) -> SimpleNamespace:
    """Loads a model as predict.py does for vectors; its `encode` computes those of the sentences."""
    torch.set_num_threads(default_threads(World()))
    embedder = Embedder.open(find_model(str(model)), choose_device("auto", World()), DTYPES[numbers])
    return SimpleNamespace(encode=partial(embedder.compute, sentences))


def load_theirs(numbers: Numbers, model: Path, sentences: Sequence[str]) -> SimpleNamespace:
    """Loads a model into sentence-transformers; its `encode` computes the vectors of the sentences."""
    silence_transformers()
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(default_threads(World()))
    encoder = SentenceTransformer(str(model), model_kwargs={"dtype": DTYPES[numbers]})
    return SimpleNamespace(encode=partial(encoder.encode, [*sentences], batch_size=TOGETHER))
