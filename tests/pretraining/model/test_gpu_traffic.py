"""What a layer asks of a GPU, counted without one: launches, and the memory that is read and written between products.

Tensors have sizes and no contents (PyTorch's `meta` device), and every operation is noted: forward, then backward, with
dropout, in bf16, on sequences that the flash kernels attend over. U is the size of a layer's hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretraining.architectures.declaration import make_shape
from pretraining.model import gpu_operations
from pretraining.model.bert import Layer
from pretraining.model.dropout import Dropout
from pretraining.model.gpu_layouts import Own, Packed
from pretraining.model.modules import LayerDropouts

BOUND = 0.505
"""The share of PyTorch's traffic between products that ours may be. It was a half until an H200 showed that norms are
15% faster backward with more blocks of rows, whose sums are 0.7 U more."""
SHAPE = make_shape("base", 30_522)
PIECES, SEQUENCES = 25_600, 256
"""Of a micro-batch, as of large at 128. With fewer pieces, weights and sums over blocks of rows are more of what is
told in U: with 4,096 it is 3% more."""
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
ATTENTION = {"_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention"}
ATTENTION |= {"_attend", *(f"{name}_backward" for name in (*ATTENTION, "_attend"))}
NO_LAUNCH = {"detach", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


@dataclass
class Count:
    """What was asked in one direction."""

    launches: int = 0
    products: int = 0
    """Launches of them that are matrix products."""
    between: float = 0.0
    """What all others read and write, in U."""


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation, as a GPU would be asked for it."""

    def __init__(self, unit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit, self.count = unit, Count()

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
        self.count.between += 0 if name in PRODUCTS | ATTENTION else moved


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

    patches: list[Any] = [(F, "dropout", drop), (F, "scaled_dot_product_attention", attend)]
    patches += [(gpu_operations, name, usable) for name in ("usable", "takes_products")]
    if kernels:
        from pretraining.model import gpu_kernels

        patches.append((gpu_kernels, "_launch", launch))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def count(kernels: bool, layout: type[Own | Packed] = Packed) -> dict[str, Count]:
    """What a layer of our encoder asks for, forward and backward."""
    with torch.device("meta"):
        layer, starts = Layer(SHAPE), torch.empty(SEQUENCES + 1, dtype=torch.int32)
        dropout = Dropout(SHAPE.dropout, torch.empty(PIECES, dtype=torch.int32))
        x = torch.empty(PIECES, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    layer.to(torch.bfloat16)
    unit = x.numel() * x.element_size()
    forward, backward = Listener(unit), Listener(unit)
    with as_on_a_gpu(forward, kernels), forward:
        out = layer(x, layout(starts, PIECES // SEQUENCES), LayerDropouts(dropout, dropout, dropout))
    gradient = torch.empty_like(out)
    with as_on_a_gpu(backward, kernels), backward:
        torch.autograd.backward(out, gradient)
    return {"forward": forward.count, "backward": backward.count}


def test_operations_and_traffic_of_a_layer_and_that_our_kernels_ask_less() -> None:
    plain = count(kernels=False)
    assert [(each.launches, each.products) for each in plain.values()] == [(16, 4), (21, 8)]
    assert [each.between for each in plain.values()] == pytest.approx([41, 44], abs=0.5)
    pytest.importorskip("triton", reason="Triton is not installed")
    ours = count(kernels=True)
    assert [each.launches for each in ours.values()] == [8, 17]
    assert sum(each.between for each in ours.values()) < BOUND * sum(each.between for each in plain.values())
    own = count(True, Own)  # which writes gradients side by side: nobody joins them
    assert [each.launches for each in own.values()] == [8, 16]
    saved = [ours[way].between - own[way].between for way in ours]
    assert saved == pytest.approx([0, 6], abs=0.3)
