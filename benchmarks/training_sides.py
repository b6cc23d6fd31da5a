"""Sides of pre-training contests: ours, which trains as train.py does, and transformers, on the same batches."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import sample_gpu, summarise_samples
from benchmarks.peer import pad_batch, silence_transformers
from benchmarks.sides import NoMemoryError
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from data_prep.shards import Manifest
from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import architectures, find_architecture, find_faults
from pretraining.config.settings import Model, Precision
from pretraining.data.batches import step_batches
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype, set_arithmetic
from pretraining.engine.step import Seeds, StepResult, train_step
from pretraining.huggingface.config import make_config
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.model.shape import ARCHITECTURE, SIDES, Learning, Shape
from pretraining.objectives.declaration import build_model, find_objective
from pretraining.planning.memory import Heaviest, find_largest_that_fits
from pretraining.processes.group import connect
from pretraining.reporting.hardware import read_peak_memory, synchronize
from pretraining.training.micro_batch import can_try, fits_in_trial, memory_to_reserve
from pretraining.training.profiling import SKIPPED, profile_steps

LEARNING_RATE = 1e-6
"""Small, so that weights stay finite where ranks exchange nothing and each trains its own."""

USUAL = EngineSettings()
"""The defaults of a recipe: AdamW, nothing compiled."""
LTR = Learning("ltr", pairs=False, sees="before")
KERNELS = 25
"""Rows of the times of kernels in results."""
AUTO = 0
"""Stands for as many sequences as fit."""


@dataclass(frozen=True)
class Contest:
    """The size of the model and of the batches of a contest."""

    size: str
    length: int
    sequences: int
    """Sequences of a step, or AUTO."""
    architecture: str = ARCHITECTURE
    """The architecture of the model."""

    @classmethod
    def parse(cls, text: str) -> Contest:
        """Reads SIZE-LENGTH-SEQUENCES, such as base-128-32; SIZE-LENGTH-auto has as many sequences as fit. Other
        architectures than BERT are named before it, as in modern:mini-128-64; they also have BERT's sizes."""
        found = re.fullmatch(r"(?:(\w*):)?(\w+)-(\d+)-(\d+|auto)", text)
        architecture, size, length, sequences = found.groups() if found else (None, "", "0", "0")
        kind = architectures().get(architecture or ARCHITECTURE)
        if kind is None or size not in {*BERT.sizes, *kind.sizes}:
            others = f"or modern:base-128-32 ({', '.join(architectures())})"
            raise UserError(f"{text}: no contest; give SIZE-LENGTH-SEQUENCES, such as base-128-32, {others}")
        count = AUTO if sequences == "auto" else int(sequences)
        if not int(length) or (not count and sequences != "auto"):
            raise UserError(f"{text}: at least one sequence of one piece")
        return cls(size, int(length), count, architecture or ARCHITECTURE)

    @property
    def name(self) -> str:
        """The name in results."""
        kind = "" if self.architecture == ARCHITECTURE else f"{self.architecture}:"
        return f"{kind}{self.size}-{self.length}" + "-auto" * (self.sequences == AUTO)

    def __str__(self) -> str:
        return self.name if self.sequences == AUTO else f"{self.name}-{self.sequences}"

    def halved(self) -> Contest:
        """Returns the contest with half the sequences. Raises UserError if there is only one."""
        if self.sequences == 1:
            raise UserError(f"{self.name}: not even one sequence fits; give --contests of a smaller model")
        return replace(self, sequences=self.sequences // 2)

    def open(self, shards: Path) -> tuple[Shape, Callable[[int], PretrainingBatch]]:
        """Returns the shape of the model, and a function that reads the batch of a step as a run does."""
        manifest = Manifest.read(shards)
        if manifest.length_for(self.length) is None:
            there = ", ".join(map(str, manifest.lengths()))
            raise UserError(f"{self}: {shards} has no sequences of {self.length}, only of {there}")
        shape = self.make_shape(manifest.vocabulary_size)
        dataset = Dataset(Corpora.one(shards, manifest), self.length, objective=find_objective(shape))
        order = BatchOrder(Order(0, dataset.shard_rows), self.sequences)

        def read(step: int) -> PretrainingBatch:
            return step_batches(dataset, order, step).micro[0]

        return shape, read

    def make_shape(self, vocabulary: int) -> Shape:
        """Makes the shape of the model, which learns by masks, and from left to right if it can only do that."""
        kind = find_architecture(self.architecture)
        size, (layers, hidden) = (self.size, (None, None)) if self.size in kind.sizes else (None, BERT.sizes[self.size])
        sizes = {"size": size, "layers": layers, "hidden": hidden, "positions": max(512, self.length)}
        return build_shape(self.architecture, Learning() if "both" in kind.sees else LTR, vocabulary, **sizes)


def build_shape(architecture: str, learns: Learning, vocabulary: int, **sizes: Any) -> Shape:
    """Builds a shape that learns as another one does, but from pairs only if the architecture has a head for them."""
    settings, kind = Model(architecture=architecture, **sizes), find_architecture(architecture)
    for fault in find_faults(settings):
        raise UserError(fault)
    if learns.sees not in kind.sees:
        raise UserError(f'"{architecture}": its pieces see {SIDES[kind.sees[0]]}, not {SIDES[learns.sees]}')
    shape = settings.shape(vocabulary, learns)
    return replace(shape, learns=replace(learns, pairs=learns.pairs and kind.learns_pairs(shape)))


class Training:
    """One rank's training of a model, as in train.py, together with the ranks that are connected."""

    def __init__(self, shape: Shape, settings: EngineSettings, device: torch.device, seed: int = 0, rank: int = 0):
        set_arithmetic(settings.precision, settings.compute, device)
        model = build_model(shape, settings.compute.checkpoint_activations).to(device).initialize(seed)
        self.engine, self.rank, self.steps = Engine(model, settings, device), rank, 0
        self._loss = find_objective(shape).loss

    def step(self, batches: PretrainingBatches, mark: Callable[[], Any] = lambda: None) -> StepResult:
        """Makes a step; a GPU may still compute when this returns."""
        seeds = Seeds.derive(0, self.steps, self.rank)
        self.steps += 1
        return train_step(self.engine, batches, LEARNING_RATE, seeds, self._loss, mark=mark)


def join_micro_batches(micro: Sequence[PretrainingBatch], ranks: int = 1) -> PretrainingBatches:
    """Joins micro-batches into the step of a rank; all ranks have equal numbers of sequences and predictions."""
    sequences, predictions = sum(len(each.lengths) for each in micro), sum(len(each.labels) for each in micro)
    return PretrainingBatches(tuple(micro), ranks * sequences, ranks * predictions)


class TrainingSide:
    """A model in training: `take` prepares a batch as a loader does, and `compute` makes a step on it."""

    device: torch.device
    shape: Shape
    take: Callable[[PretrainingBatch], None]
    compute: Callable[[], None]
    samples: Sequence[Sequence[float]] = ()
    """Power and clock of the GPU during steps."""

    def step(self, batch: PretrainingBatch) -> float:
        """Makes a step on a batch; returns the seconds from when it is prepared to its end."""
        self.take(batch)
        samples = sample_gpu() if self.device.type == "cuda" else []
        known, start = len(samples), time.perf_counter()
        self.compute()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        self.samples = [*self.samples, *samples[known:]]
        return seconds

    def describe(self) -> tuple[Shape, dict[str, float]]:
        """Returns the shape of its model; the peak memory of its process, and the power and clock of its GPU."""
        peak = round(read_peak_memory(self.device) / 2**30, 2)
        return self.shape, {"peak_memory_gib": peak, **summarise_samples(self.samples)}


class OurTraining(TrainingSide):
    """A step as the trainer does it."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, settings: EngineSettings = USUAL, other: str = ""
    ):
        """`other` is another architecture, of the same layers and width."""
        sizes = {"layers": shape.layers, "hidden": shape.hidden, "positions": shape.positions}
        self.shape = build_shape(other, shape.learns, shape.vocabulary, **sizes) if other else shape
        self.device = device
        if not dist.is_initialized():  # by another side in this process
            connect(World(), device)
        self.settings = replace(settings, precision=Precision(dtype=name_dtype(dtype)))
        self.training = Training(self.shape, self.settings, device)

    def take(self, batch: PretrainingBatch) -> None:
        """Pins the next batch, as the loader does, and applies this side's arithmetic settings to the process."""
        self.batches = join_micro_batches([batch]).pin_for(self.device)
        set_arithmetic(self.settings.precision, self.settings.compute, self.device)

    def compute(self) -> None:
        """Makes a step."""
        self.training.step(self.batches)

    def close(self) -> None:
        """Gives back the memory of the model and of its optimizer."""
        self.training.engine.close()

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

    def write_profile(self, folder: Path) -> list[dict[str, Any]]:
        """Writes a trace and a table of the operations of a step into a folder; returns the longest operations."""
        set_arithmetic(self.settings.precision, self.settings.compute, self.device)
        os.environ["KINETO_LOG_LEVEL"] = "99"  # PyTorch's profiler says nothing on stderr
        with profile_steps(folder, 1, self.device, lambda _: None) as profiled:
            for _ in range(SKIPPED + 2):
                self.compute()
                synchronize(self.device)
                profiled.step()
        time_of = attrgetter("self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total")
        own = [row for row in profiled.key_averages() if row.device_type.name == self.device.type.upper()]
        rows = sorted(own, key=time_of, reverse=True)[:KERNELS]
        return [{"name": row.key[:120], "calls": row.count, "microseconds": round(time_of(row))} for row in rows]


class TheirTraining(TrainingSide):
    """A step as users of transformers do it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, compiled: bool = False):
        silence_transformers()
        import transformers

        from data_prep.vocabulary.vocabulary import Special  # needs tokenizers, as transformers does

        special = Special(*range(5))
        self.shape = find_architecture(shape.architecture).fit_vocabulary(shape, special)
        self.device, self.dtype = device, dtype
        config = make_config(self.shape, special, torch.float32)
        kind = getattr(transformers, config["architectures"][0])
        with device:  # where initialising the weights of large is fast
            # the setting is ModernBERT's: logits of the predicted pieces alone
            self.model: Any = kind(kind.config_class(**config, sparse_prediction=True)).train()
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def take(self, batch: PretrainingBatch) -> None:
        """Pads and pins a batch, as the workers of a DataLoader do."""
        inputs = pad_batch(batch)
        if self.shape.one_way:  # where their class shifts labels itself
            inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        if not self.shape.learns.pairs:
            del inputs["token_type_ids"], inputs["next_sentence_label"]
        self.inputs = {name: each.pin_memory() if self.device.type == "cuda" else each for name, each in inputs.items()}

    def compute(self) -> None:
        """Makes a step on the padded batch."""
        inputs = {name: each.to(self.device, non_blocking=True) for name, each in self.inputs.items()}
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**inputs).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
