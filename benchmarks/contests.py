"""A model and the batches that it is measured on; our own step, and those that it is measured against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer import padded
from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining.config.settings import Compute, Precision
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import choose_dtype, name_dtype, set_arithmetic
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.model.shape import SIZES, Shape
from pretraining.processes.group import connect
from pretraining.processes.launchers import World
from pretraining.reporting.hardware import synchronize

LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Contest:
    """A model, and the batches that all sides train on."""

    size: str
    length: int
    sequences: int

    @classmethod
    def parse(cls, text: str) -> Contest:
        """Reads SIZE-LENGTH-SEQUENCES, such as base-128-32."""
        size, *numbers = text.split("-")
        if size not in SIZES or len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise UserError(f"{text}: no contest; give SIZE-LENGTH-SEQUENCES, such as base-128-32")
        return cls(size, *map(int, numbers))

    @property
    def name(self) -> str:
        return f"{self.size}-{self.length}"

    def load(self, shards: Path, count: int) -> tuple[Shape, list[PretrainingBatch]]:
        """The model's sizes, and so many batches."""
        manifest = Manifest.read(shards)
        dataset = Dataset(shards, manifest, self.length)
        order = BatchOrder(Order(0, dataset.shard_rows), self.sequences)
        batches = [step_batches(dataset, order, step).micro[0] for step in range(count)]
        return Shape.named(self.size, manifest.vocabulary_size), batches


def contest_dtype(device: torch.device) -> torch.dtype:
    """What all sides compute in: bf16, or fp16 on a GPU that has no bf16."""
    return choose_dtype("auto" if device.type == "cuda" else "bf16", device)


class Ours:
    """A step as the trainer does it."""

    def __init__(self, shape: Shape, device: torch.device, deterministic: bool = False):
        self.device, self.steps = device, 0
        connect(World(), device)
        compute = Compute.model_validate({"deterministic": True} if deterministic else {})
        settings = EngineSettings(precision=Precision(dtype=name_dtype(contest_dtype(device))), compute=compute)
        set_arithmetic(settings.precision, compute, device)
        self.engine = Engine(Bert(shape).initialize(0), settings, device)

    def prepare(self, batch: PretrainingBatch) -> Callable[[], None]:
        """The step on a batch as the loader hands it over."""
        return partial(self.step, batch)

    def step(self, batch: PretrainingBatch) -> None:
        self.start_step([batch])
        synchronize(self.device)

    def start_step(self, micro: Sequence[PretrainingBatch]) -> None:
        """A step of these micro-batches, which a GPU may still be at when this returns."""
        sequences, labels = sum(len(each.lengths) for each in micro), sum(len(each.labels) for each in micro)
        batches = PretrainingBatches(tuple(micro), sequences, labels)
        train_step(self.engine, batches, LEARNING_RATE, Seeds.of(0, self.steps, 0), pretraining_loss)
        self.steps += 1


class Theirs:
    """A step as users of transformers do it."""

    def __init__(self, shape: Shape, device: torch.device):
        from transformers import BertConfig, BertForPreTraining

        config = BertConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.intermediate,
        )
        self.device = device
        self.model: Any = BertForPreTraining(config).train()
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.dtype = contest_dtype(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    def prepare(self, batch: PretrainingBatch) -> Callable[[], None]:
        """The step on a batch that is padded and pinned already, as the workers of a DataLoader do it."""
        inputs = padded(batch)
        if self.device.type == "cuda":
            inputs = {name: each.pin_memory() for name, each in inputs.items()}
        return partial(self.step, inputs)

    def step(self, inputs: dict[str, torch.Tensor]) -> None:
        inputs = {name: each.to(self.device, non_blocking=True) for name, each in inputs.items()}
        with torch.autocast(self.device.type, dtype=self.dtype):
            loss = self.model(**inputs).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        synchronize(self.device)
