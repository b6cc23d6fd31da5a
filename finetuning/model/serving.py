"""A fine-tuned model that only answers, on request with products in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from finetuning.model.heads import TaskBatch, TaskModel
from pretraining.model import cpu_kernels as kernels
from pretraining.model.encoder import Linear
from pretraining.model.fused import gelu
from pretraining.model.serving import Product, ServedEncoder, product


class QuantisedProduct(Product):
    """Multiplies with the weight in 8 bits, with a scale for each output and one for each row of the input.

    So the answer about a text does not depend on its neighbours in a batch.
    """

    ZERO = 128
    """The byte that stands for 0 on the left of a product; on the right it is 0."""

    def __init__(self, linear: Linear) -> None:
        weight = linear.weight.detach().float()
        self.scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        numbers = (weight / self.scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(numbers, None)
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x))
        kernels.call("quantise_rows", x.contiguous(), numbers, scales, *x.shape)
        ours, theirs = (numbers, 1.0, self.ZERO), (self.weight, self.scales, self.zeros)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(*ours, *theirs, None, 1.0, 0, x.dtype, "none", [], "")
        kernels.call("rescale_rows", product, scales, *product.shape)
        return product

    def with_gelu(self, x: Tensor) -> Tensor:
        return gelu(self(x), self.bias)


def check_int8(device: torch.device) -> None:
    """Raises UserError where products in 8 bits are not to be had."""
    cured = 'take "bf16", "fp32" or "auto"'
    if device.type != "cpu":
        raise UserError(f'dtype "int8": on a CPU alone; {cured}')
    if not torch.cpu._is_vnni_supported() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise UserError(f'dtype "int8": this processor, or this PyTorch, has no products of bytes; {cured}')
    if not kernels.usable(torch.zeros(1)):
        raise UserError(f'dtype "int8": needs a C++ compiler; install g++, or {cured}')


class ServedModel:
    """A fine-tuned model that answers and does not learn. It takes the layers of the one that it is made of."""

    def __init__(self, model: TaskModel, int8: bool = False) -> None:
        """`int8`: layers multiply in 8 bits, which `check_int8` has allowed; all else stays in the model's numbers."""
        self.model = model
        self.encoder = ServedEncoder(model, model.sees_one, QuantisedProduct if int8 else product)

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        model, encoder = self.model, self.encoder
        if model.sees_one:
            return model.say(encoder.one(batch, model.sequence_places(batch)), batch)
        return model.say(model.seen(encoder.all(batch), batch), batch)
