"""A fine-tuned model for inference, also in int8."""

from __future__ import annotations

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from finetuning.model.graphs import Graphs
from finetuning.model.heads import TaskBatch, TaskModel
from pretraining.architectures.declaration import find_architecture, serve_encoder
from pretraining.devices import cpu_has_int8
from pretraining.model import cpu_kernels as kernels
from pretraining.model.shape import Shape


def check_int8(device: torch.device, shape: Shape) -> None:
    """Raises UserError where int8 products are not available."""
    cured, kind = 'take "bf16", "fp32" or "auto"', find_architecture(shape.architecture)
    if kind.find_server() is None:
        raise UserError(f'dtype "int8": layers of {kind.title} are not computed in 8 bits; {cured}')
    if device.type != "cpu":
        raise UserError(f'dtype "int8": on a CPU alone; {cured}')
    if not cpu_has_int8():
        raise UserError(f'dtype "int8": this processor, or this PyTorch, has no products of bytes; {cured}')
    if not kernels.usable(torch.zeros(1)):
        raise UserError(f'dtype "int8": needs a C++ compiler; install g++, or {cured}')


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
        model, encoder = self.model, self.encoder
        if model.sees_one:
            return model.apply_head(encoder.compute_one(batch, model.sequence_places(batch)), batch)
        return model.apply_head(model.select_states(encoder.compute_all(batch), batch), batch)
