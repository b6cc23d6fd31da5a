#!/usr/bin/env python3
"""Counts what a layer asks of a GPU, without one: launches, and the memory that is read and written between products.

    python benchmarks/operators.py
    python benchmarks/operators.py --size base --out build/operators.json

Tensors have sizes and no contents (PyTorch's `meta` device), and what is asked of them is written down: forward,
then backward, with dropout, in bf16, on sequences that the flash kernels attend over. Sides are our layer with the
kernels of `gpu_kernels.py`, our layer with PyTorch's operations alone, and that of transformers with `sdpa`. U is
the size of a layer's hidden states: what is read and written is told in U, products and attention apart, since they
compute and do not wait for memory.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import run_command, write_results
from benchmarks.peer import missing
from benchmarks.tables import matrix, show
from data_prep.common.errors import UserError
from pretraining.model import gpu_operations
from pretraining.model.attention import Packed
from pretraining.model.encoder import Layer, LayerDropouts
from pretraining.model.fused import Dropout
from pretraining.model.shape import SIZES, Shape

PIECES, SEQUENCES = 25_600, 256
"""Of a micro-batch, as of large at 128. With fewer pieces, weights and sums over blocks of rows are more of what is
told in U: with 4,096 it is 3% more."""
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
ATTENTION = {"_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention"}
ATTENTION |= {f"{name}_backward" for name in ATTENTION}
NO_LAUNCH = {"detach", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


@dataclass(frozen=True)
class Operators:
    """Counts what a layer asks of a GPU."""

    size: str = "large"
    """Size of the model."""
    out: Path | None = None
    """File for the counts (default: none)."""


@dataclass
class Count:
    """What was asked in one direction."""

    launches: int = 0
    products: int = 0
    """Launches of them that are matrix products."""
    attention: int = 0
    """And of attention."""
    between: float = 0.0
    """What all others read and write, in U."""


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation, as a GPU would be asked for it."""

    def __init__(self, unit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit, self.count, self.seen = unit, Count(), list[tuple[str, float]]()

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        name = operation.__name__.partition(".")[0]
        if name == "addmm" and args[0].dim() == 2:
            self.note("copy_", [args[0], out])  # on a GPU, `addmm` copies first what it adds to
        if not operation.is_view and name not in NO_LAUNCH:
            self.note(name, [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)])
        return out

    def note(self, name: str, tensors: list[Tensor]) -> None:
        """A launch that reads or writes each of these tensors once."""
        moved = sum(each.numel() * each.element_size() for each in tensors) / self._unit
        self.count.launches += 1
        self.count.products += name in PRODUCTS
        self.count.attention += name in ATTENTION
        self.count.between += 0 if name in PRODUCTS | ATTENTION else moved
        self.seen.append((name, moved))


@contextmanager
def as_on_a_gpu(listener: Listener, kernels: bool) -> Iterator[None]:
    """Lets tensors without contents go the way of those on a GPU, through our kernels or through none."""

    def drop(x: Tensor, p: float = 0.5, training: bool = True, _: bool = False) -> Tensor:
        """What a GPU does for dropout: one launch, with a mask that is kept."""
        return torch.native_dropout(x, p, training)[0] if p and training else x

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, dropout_p: float = 0.0, **__: Any) -> Tensor:
        """What a GPU does for attention without padding: the flash kernels."""
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p)[0]
        return out

    def launch(kernel: Any, _: Any, __: Any, *arguments: Any, **___: Any) -> None:
        listener.note(kernel.__name__, [each for each in arguments if isinstance(each, Tensor)])

    def usable(*_: Any) -> bool:
        return kernels

    patches: list[Any] = [
        mock.patch.object(F, "dropout", drop),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(gpu_operations, "usable", usable),
        mock.patch.object(gpu_operations, "takes_products", usable),
    ]
    if kernels:
        from pretraining.model import gpu_kernels

        patches.append(mock.patch.object(gpu_kernels, "_launch", launch))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def our_layer(shape: Shape) -> Callable[[Tensor], Tensor]:
    """A layer of our encoder."""
    with torch.device("meta"):
        layer, starts = Layer(shape), torch.empty(SEQUENCES + 1, dtype=torch.int32)
        keys = torch.empty(PIECES, dtype=torch.int32)
    layer.to(torch.bfloat16)
    layout = Packed(starts, PIECES // SEQUENCES)
    dropout = Dropout(shape.dropout, keys)
    return lambda x: layer(x, layout, LayerDropouts(dropout, dropout, dropout))


def their_layer(shape: Shape) -> Callable[[Tensor], Tensor]:
    """A layer of transformers, on as many pieces, none of them padding."""
    from transformers.models.bert import configuration_bert, modeling_bert

    theirs: Any = modeling_bert
    config: Any = configuration_bert.BertConfig(
        hidden_size=shape.hidden, num_attention_heads=shape.heads, intermediate_size=shape.intermediate
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        layer = theirs.BertLayer(config)
    layer.to(torch.bfloat16).train()

    def compute(x: Tensor) -> Tensor:
        out: Any = layer(x.view(SEQUENCES, -1, shape.hidden))
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states.view(PIECES, -1)

    return compute


def count(layer: Callable[[Tensor], Tensor], shape: Shape, kernels: bool) -> dict[str, Count]:
    """What a layer asks for, forward and backward."""
    with torch.device("meta"):
        x = torch.empty(PIECES, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    unit = x.numel() * x.element_size()
    forward, backward = Listener(unit), Listener(unit)
    with as_on_a_gpu(forward, kernels), forward:
        out = layer(x)
    gradient = torch.empty_like(out)
    with as_on_a_gpu(backward, kernels), backward:
        torch.autograd.backward(out, gradient)
    return {"forward": forward.count, "backward": backward.count}


def sides(shape: Shape) -> dict[str, dict[str, Count]]:
    """The counts of all sides that can be had here."""
    found = {"torch's operations": count(our_layer(shape), shape, kernels=False)}
    if not missing("triton"):
        found = {"our kernels": count(our_layer(shape), shape, kernels=True), **found}
    if not missing("transformers"):
        found["transformers"] = count(their_layer(shape), shape, kernels=False)
    return found


def measure(settings: Operators, console: Console) -> None:
    """Counts, and prints a table."""
    if settings.size not in SIZES:
        raise UserError(f"--size {settings.size}: is none of {', '.join(SIZES)}")
    shape = Shape.from_size(settings.size, 30_522)
    rows = []
    for side, directions in sides(shape).items():
        for direction, each in directions.items():
            figures = {**vars(each), "between": round(each.between, 1)}
            rows.append({"side": side, "direction": direction, **figures})
    show(console, [matrix(f"A layer of {settings.size}: launches, and U read and written between products", rows)])
    for name in ("triton", "transformers"):
        if missing(name):
            console.print(f"{name} is not installed: its side is left out")
    if settings.out is not None:
        write_results(settings.out, {"benchmark": "operators", "size": settings.size, "rows": rows})


if __name__ == "__main__":
    run_command(Operators, measure)
