"""Inference with a fine-tuned model, optionally in int8."""

from __future__ import annotations

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from finetuning.model.heads import TaskBatch, TaskModel
from pretraining.model import cpu_kernels as kernels
from pretraining.model.serving import ServedEncoder


def check_int8(device: torch.device) -> None:
    """Raises UserError where int8 products are not available."""
    cured = 'take "bf16", "fp32" or "auto"'
    if device.type != "cpu":
        raise UserError(f'dtype "int8": on a CPU alone; {cured}')
    if not torch.cpu._is_vnni_supported() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise UserError(f'dtype "int8": this processor, or this PyTorch, has no products of bytes; {cured}')
    if not kernels.usable(torch.zeros(1)):
        raise UserError(f'dtype "int8": needs a C++ compiler; install g++, or {cured}')


class ServedModel:
    """A fine-tuned model for inference. It takes over the layers of the given model."""

    def __init__(self, model: TaskModel, int8: bool = False) -> None:
        """`int8`: layers multiply in 8 bits, as `check_int8` allows; all else stays in the model's dtype."""
        self.model = model
        self.encoder = ServedEncoder(model, model.sees_one, in_bytes=int8)

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        model, encoder = self.model, self.encoder
        if model.sees_one:
            return model.apply_head(encoder.one(batch, model.sequence_places(batch)), batch)
        return model.apply_head(model.select_states(encoder.all(batch), batch), batch)
