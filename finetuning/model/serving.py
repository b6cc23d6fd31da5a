"""A fine-tuned model for inference, also in int8, on a GPU by CUDA graphs.

By a graph the host starts all kernels of a short text at once. To start one takes 20 to 45 µs, and all together longer
than a GPU computes for such a text. A graph has a fixed shape, to which a batch is filled up: with sequences before its
own, which nobody reads. It is captured at the first batch of its shape, and used only if it gives the same bits as its
kernels one by one. Graphs share their memory, which is that of the largest of them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_prep.common.errors import UserError
from finetuning.model.heads import TaskBatch, TaskModel
from pretraining.answering.one_call import BYTES, PANEL, can_multiply, fits_panels
from pretraining.architectures.declaration import find_architecture, serve_encoder
from pretraining.architectures.weights import Kind
from pretraining.devices import cpu_has_int8
from pretraining.model import cpu_kernels as kernels
from pretraining.model.cuda_graphs import capture, describe_failure
from pretraining.model.shape import Shape

TEXTS, LENGTHS = (1, 8), (32, 64, 128, 384)
"""The sizes of graphs: numbers of texts, and of pieces of a text. A batch takes the smallest that it fits into."""
SPARE = 512
"""Pieces that may fill up a batch beside as many as its own: they take less time than the start of the kernels."""
Compute = Callable[[TaskBatch], Tensor]
"""Computes the logits of a batch on the GPU."""


class GraphShape(NamedTuple):
    """The shape of a graph: twice as many sequences as texts, since as many may be needed to fill it up."""

    texts: int
    length: int

    @property
    def rows(self) -> int:
        """The number of pieces."""
        return self.texts * self.length


def find_shape(lengths: tuple[int, ...], longest: int) -> GraphShape | None:
    """Finds the smallest shape for sequences of these lengths; None if all are too small, or far too large. `longest`
    is the most pieces that the model reads."""
    texts = next((most for most in TEXTS if most >= len(lengths)), None)
    length = next((min(most, longest) for most in LENGTHS if most >= max(lengths)), None)
    if texts is None or length is None or texts * length > 2 * sum(lengths) + SPARE:
        return None
    return GraphShape(texts, length)


class FilledBatch:
    """A batch of a fixed shape on a device, which is written anew for each question by one copy."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        self.shape, count = shape, 3 * shape.rows
        self.host = torch.zeros(count + shape.texts + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = self.host.to(device)
        pieces, segments, positions = self.there[:count].view(3, -1)
        starts = self.there[count:].view(torch.int32)[: 2 * shape.texts + 1]
        lengths, nothing = (shape.length,) * 2 * shape.texts, pieces[:0]
        examples = np.zeros((len(lengths), 2), np.int64)
        self.batch = TaskBatch(pieces, segments, positions, starts, lengths, examples, labels=None, words=nothing)

    def write(self, batch: TaskBatch) -> None:
        """Copies a batch of the host into it, behind the sequences that fill it up."""
        texts, length, rows = *self.shape, self.shape.rows
        spare, fillers = rows - len(batch.pieces), 2 * texts - len(batch.lengths)
        ids, starts = self.host[: 3 * rows].view(3, -1), self.host[3 * rows :].view(torch.int32)
        ids[:2, :spare], ids[2, :spare] = 0, torch.arange(spare) % length
        torch.stack([batch.pieces, batch.segments, batch.positions], out=ids[:, spare:])
        starts[:fillers] = (torch.arange(fillers) * length).clamp(max=spare)
        starts[fillers : 2 * texts + 1] = batch.starts + spare
        self.there.copy_(self.host, non_blocking=True)


class Graphs:
    """Computes the logits of batches of the host, by graphs those of a few short texts."""

    def __init__(self, compute: Compute, kind: Kind, longest: int, device: torch.device) -> None:
        self.compute, self.kind, self.longest, self.device = compute, kind, longest, device
        self.captured: dict[GraphShape, tuple[FilledBatch, Callable[[], Tensor]]] = {}
        self.pool: Any = None
        self.failed, self.turn = False, threading.Lock()

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of a batch; one thread at a time, since each graph has one place for inputs."""
        shape = None if self.failed or self.kind == "tags" else find_shape(batch.lengths, self.longest)
        if shape is None:
            return self.compute(batch.to(self.device))
        with self.turn:
            if shape not in self.captured:
                return self.begin(FilledBatch(shape, self.device), batch)
            filled, replay = self.captured[shape]
            filled.write(batch)
            return self.take(replay(), batch)

    def begin(self, filled: FilledBatch, batch: TaskBatch) -> Tensor:
        """Computes the logits of the first batch of a shape kernel by kernel, and captures a graph for later ones."""
        filled.write(batch)
        found = self.take(self.compute(filled.batch), batch)
        try:
            replay, self.pool = capture(lambda: self.compute(filled.batch), self.pool)
            same = torch.equal(self.take(replay(), batch), found)
        except RuntimeError as error:
            self.give_up(describe_failure(error))
        else:
            self.captured[filled.shape] = filled, replay
            if not same and bool(found.isfinite().all()):
                self.give_up("CUDA graphs do not give the same bits here")
        return found

    def take(self, logits: Tensor, batch: TaskBatch) -> Tensor:
        """Cuts the logits of a batch out of those of the filled batch, and copies them to the host."""
        own = logits[-len(batch.pieces if self.kind == "spans" else batch.lengths) :].cpu()
        return own.view(-1, batch.choices) if self.kind == "choice" else own

    def give_up(self, reason: str) -> None:
        """Says why from now on all kernels are started one by one, and lets the graphs go."""
        self.failed, self.captured = True, {}
        warnings.warn(f"{reason}: short texts take longer", stacklevel=2)


def check_int8(device: torch.device, shape: Shape) -> None:
    """Raises UserError where int8 products are not available."""
    kind = find_architecture(shape.architecture)
    has_code = kernels.usable(torch.zeros(1)) and (cpu_has_int8() or (fits_panels(shape) and can_multiply(BYTES)))
    if kind.find_server() is None or device.type != "cpu" or not has_code:
        raise UserError(
            'dtype "int8": needs a CPU with products of bytes (AVX512-VNNI; or AVX2, where the sizes of heads and '
            f"layers are multiples of {PANEL}), a C++ compiler, and an architecture with layers in 8 bits, as BERT; "
            f'not on {device.type} for {kind.title} here; take "auto"'
        )


class ServedModel:
    """A fine-tuned model for inference. It takes over the given model."""

    def __init__(self, model: TaskModel, int8: bool = False, graphs: bool = True) -> None:
        """`int8`: layers multiply in 8 bits, as `check_int8` allows; all else stays in the model's dtype. `graphs`: a
        GPU answers short texts by CUDA graphs, where the architecture has layers for inference."""
        self.model, self.device = model, model.head.weight.device
        self.encoder = serve_encoder(model, model.sees_one, in_bytes=int8)
        by_graphs = graphs and self.device.type == "cuda" and self.encoder.layers is not None and not model.has_bilstm
        self.graphs = Graphs(self._compute, model.kind, model.shape.positions, self.device) if by_graphs else None

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head for a batch of the host, in fp32."""
        return self._compute(batch.to(self.device)) if self.graphs is None else self.graphs.logits(batch)

    def _compute(self, batch: TaskBatch) -> Tensor:
        model, encode = self.model, self.encoder.encode
        if model.sees_one:
            return model.apply_head(encode(batch, model.sequence_places(batch)), batch)
        return model.apply_head(model.select_states(encode(batch), batch), batch)
