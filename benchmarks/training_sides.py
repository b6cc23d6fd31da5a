"""Sides of pre-training contests: ours, which trains as train.py does, and transformers, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer import pad_batch
from benchmarks.sides import NoMemoryError, silence_stderr
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from data_prep.shards import Manifest
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.config.settings import Precision
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype, set_arithmetic
from pretraining.engine.step import Seeds, StepResult, train_step
from pretraining.huggingface.config import make_config
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.planning.memory import Heaviest, find_largest_that_fits
from pretraining.processes.group import connect
from pretraining.reporting.hardware import read_peak_memory, synchronize
from pretraining.training.micro_batch import can_try, fits_in_trial, memory_to_reserve
from pretraining.training.profiling import SKIPPED, profile_steps

LEARNING_RATE = 1e-6
"""Small, so that weights stay finite where ranks exchange nothing and each trains its own."""

USUAL = EngineSettings()
"""The defaults of a recipe: AdamW, nothing compiled."""
AUTO = 0
"""Stands for as many sequences as fit."""


@dataclass(frozen=True)
class Contest:
    """The size of the model and of the batches of a contest."""

    size: str
    length: int
    sequences: int
    """Sequences of a step, or AUTO."""

    @classmethod
    def parse(cls, text: str) -> Contest:
        """Reads SIZE-LENGTH-SEQUENCES, such as base-128-32; SIZE-LENGTH-auto has as many sequences as fit."""
        size, *numbers = text.split("-")
        is_auto = numbers[1:] == ["auto"]
        counts = numbers[:1] if is_auto else numbers
        if size not in BERT.sizes or len(numbers) != 2 or not all(number.isdecimal() for number in counts):
            raise UserError(f"{text}: no contest; give SIZE-LENGTH-SEQUENCES, such as base-128-32")
        if not all(map(int, counts)):
            raise UserError(f"{text}: at least one sequence of one piece")
        return cls(size, int(numbers[0]), AUTO if is_auto else int(numbers[1]))

    @property
    def name(self) -> str:
        """The name in results."""
        return f"{self.size}-{self.length}" + "-auto" * (self.sequences == AUTO)

    def __str__(self) -> str:
        return self.name if self.sequences == AUTO else f"{self.name}-{self.sequences}"

    def halved(self) -> Contest:
        """Returns the contest with half the sequences. Raises UserError if there is only one."""
        if self.sequences == 1:
            raise UserError(
                f"{self.name}: not even one sequence fits; take a smaller model, as in --contests mini-128-8"
            )
        return replace(self, sequences=self.sequences // 2)

    def open(self, shards: Path) -> tuple[Shape, Callable[[int], PretrainingBatch]]:
        """Returns the shape of the model, and a function that reads the batch of a step as a run does."""
        manifest = Manifest.read(shards)
        if manifest.length_for(self.length) is None:
            there = ", ".join(map(str, manifest.lengths()))
            raise UserError(f"{self}: {shards} has no sequences of {self.length}, only of {there}")
        dataset = Dataset(shards, manifest, self.length)
        order = BatchOrder(Order(0, dataset.shard_rows), self.sequences)

        def read(step: int) -> PretrainingBatch:
            return step_batches(dataset, order, step).micro[0]

        return make_shape(self.size, manifest.vocabulary_size), read


class Training:
    """One rank's training of a model, as in train.py, together with the ranks that are connected."""

    def __init__(self, shape: Shape, settings: EngineSettings, device: torch.device, seed: int = 0, rank: int = 0):
        set_arithmetic(settings.precision, settings.compute, device)
        model = build_model(shape, settings.compute.checkpoint_activations).to(device).initialize(seed)
        self.engine, self.rank, self.steps = Engine(model, settings, device), rank, 0

    def step(self, batches: PretrainingBatches, mark: Callable[[], Any] = lambda: None) -> StepResult:
        """Makes a step; a GPU may still compute when this returns."""
        seeds = Seeds.derive(0, self.steps, self.rank)
        self.steps += 1
        return train_step(self.engine, batches, LEARNING_RATE, seeds, MLM.loss, mark=mark)


def join_micro_batches(micro: Sequence[PretrainingBatch], ranks: int = 1) -> PretrainingBatches:
    """Joins micro-batches into the step of a rank; all ranks have equal numbers of sequences and predictions."""
    sequences, predictions = sum(len(each.lengths) for each in micro), sum(len(each.labels) for each in micro)
    return PretrainingBatches(tuple(micro), ranks * sequences, ranks * predictions)


class TrainingSide:
    """A model in training: `take` prepares a batch as a loader does, and `step` makes a step on it."""

    device: torch.device

    def peak(self) -> int:
        """Returns the peak memory in bytes."""
        return read_peak_memory(self.device)


class OurTraining(TrainingSide):
    """A step as the trainer does it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, settings: EngineSettings = USUAL):
        self.shape, self.device = shape, device
        connect(World(), device)
        self.training = Training(shape, replace(settings, precision=Precision(dtype=name_dtype(dtype))), device)

    def take(self, batch: PretrainingBatch) -> None:
        """Takes the batch of the next step."""
        self.batches = join_micro_batches([batch])

    def step(self) -> None:
        """Makes a step, and waits for its end."""
        self.result = self.training.step(self.batches)
        synchronize(self.device)

    def last_loss(self) -> float:
        """Returns the loss of the last step."""
        return float(torch.stack(self.result.losses).sum())

    def largest(self, length: int, predictions: int, most: int) -> int:
        """Returns the sequences that a trainer takes for micro_batch = "auto" in a step of `most`. The state of the
        optimizer must be allocated already."""
        dtype = name_dtype(self.training.engine.dtype)
        heaviest = Heaviest(self.shape, dtype, length, predictions, recompute=False)
        sizes = heaviest.sizes(most, self.device.type == "cpu")
        if not can_try(self.device):
            return sizes[-1]
        reserve = memory_to_reserve(0.0, self.device)
        found = find_largest_that_fits(sizes, partial(fits_in_trial, heaviest, self.device, reserve))
        if found is None:
            raise NoMemoryError(f"no memory for one sequence of {length}")
        return found

    def write_profile(self, folder: Path) -> None:
        """Writes a trace and a table of the operations of a step into a folder."""
        with silence_stderr(), profile_steps(folder, 1, self.device, lambda _: None) as profiled:
            for _ in range(SKIPPED + 2):
                self.step()
                profiled.step()


class TheirTraining(TrainingSide):
    """A step as users of transformers do it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, compiled: bool = False):
        from transformers import BertConfig, BertForPreTraining

        from data_prep.vocabulary.vocabulary import Special  # needs tokenizers, as transformers does

        self.device, self.dtype = device, dtype
        config = BertConfig(**make_config(shape, Special(*range(5)), torch.float32))
        with device:  # where initialising the weights of large is fast
            self.model: Any = BertForPreTraining(config).train()
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def take(self, batch: PretrainingBatch) -> None:
        """Pads and pins a batch, as the workers of a DataLoader do."""
        inputs = pad_batch(batch)
        self.inputs = {name: each.pin_memory() if self.device.type == "cuda" else each for name, each in inputs.items()}

    def step(self) -> None:
        """Makes a step on the padded batch, and waits for its end."""
        inputs = {name: each.to(self.device, non_blocking=True) for name, each in self.inputs.items()}
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**inputs).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        synchronize(self.device)
