"""What a layer asks of the host beside a GPU, counted without one: Python calls, nodes of autograd and launches.

Tensors have sizes and no contents (PyTorch's `meta` device), and no kernel is launched. The host, not the GPU, decides
how long a step with few pieces takes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.marks import has_gpu
from torch import Tensor

from pretraining.architectures.declaration import make_shape
from pretraining.model import attention, gpu_layouts
from pretraining.model import gpu_operations as gpu
from pretraining.model.bert import Layer
from pretraining.model.dropout import Dropout
from pretraining.model.gpu_layouts import Own, Packed
from pretraining.model.modules import LayerDropouts

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(has_gpu(), reason="the host is counted without a GPU")
SHAPE = make_shape("base", 30_522)
PIECES, SEQUENCES = 3200, 32
COUNTED = (f"{ROOT}/pretraining/", "/torch/nn/modules/", "/torch/autograd/")
"""The folders whose functions count: not those that imitate operations on `meta`."""
FORWARD, BACKWARD, NODES = 122, 41, 23
"""The most calls of Python forward and backward, and nodes of autograd (13 are of weights).
Triton's own calls, about ten a launch, are not counted."""


class Calls:
    """Counts calls of Python functions."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        self.count += event == "call" and any(folder in frame.f_code.co_filename for folder in COUNTED)

    def of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Does some work; returns its result and the number of calls."""
        before = self.count
        sys.setprofile(self.note)
        try:
            found = work()
        finally:
            sys.setprofile(None)
        return found, self.count - before


@contextmanager
def launching_nothing(launched: list[Any]) -> Iterator[None]:
    """Tensors on `meta` take the way of those on a GPU; kernels are noted by name, with what they are compiled for."""
    usable = gpu.usable

    def note(kernel: Any, _: Any, tile: Any, *__: Any, **constants: Any) -> None:
        launched.append((kernel.__name__, tile, tuple(sorted(constants.items()))))

    def decide(operation: gpu.Operation, x: Any, *more: Any) -> bool:
        on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("meta", 0), dtype=x.dtype, shape=x.shape, dim=x.dim)
        return usable(operation, on_gpu, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(gpu, "usable", decide)
        patch.setattr(gpu, "takes_products", lambda _: True)
        patch.setattr("pretraining.model.gpu_kernels._launch", note)
        gpu._works.cache_clear()
        yield
        gpu._works.cache_clear()


def find_nodes(out: Tensor) -> set[Any]:
    """The nodes of autograd behind a tensor."""
    nodes: set[Any] = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [each for each, _ in node.next_functions]
    return nodes


def make_layer(dropout: float = SHAPE.dropout) -> tuple[Layer, Tensor, Tensor, LayerDropouts]:
    """A layer, the starts of sequences, hidden states and dropouts."""
    with torch.device("meta"):
        layer, starts = Layer(SHAPE).bfloat16(), torch.empty(SEQUENCES + 1, dtype=torch.int32)
        drops = Dropout(dropout, torch.empty(PIECES, dtype=torch.int32))
        x = torch.empty(PIECES, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True)
    return layer, starts, x, LayerDropouts(drops, drops, drops)


@pytest.mark.parametrize(("layout", "launches"), [(Packed, 11), (Own, 12)])
def test_a_layer_asks_little_of_the_host(layout: type[Own | Packed], launches: int) -> None:
    """The second time: then what is decided once is known. Launches are those of our kernels; beside them there are 12
    products, and flash attention."""
    layer, starts, x, dropouts = make_layer()
    launched: list[Any] = []
    with launching_nothing(launched):
        laid, calls = layout(starts, 128), Calls()
        layer(x, laid, dropouts).backward(torch.empty_like(x))
        del launched[:]
        out, forward = calls.of(lambda: layer(x, laid, dropouts))
        assert len(find_nodes(out)) <= NODES
        _, backward = calls.of(lambda: out.backward(torch.empty_like(out)))
    assert len(launched) <= launches
    assert forward <= FORWARD
    assert backward <= BACKWARD


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("longest", "window"), [(40, None), (100, None), (100, 30), (300, None)])
def test_kernels_are_tried_that_a_layer_launches(
    dropout: float, longest: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled once, before attention is chosen: a failure leaves a way out, and no kernel is compiled in vain."""
    monkeypatch.setattr(gpu_layouts, "_choice", "own")
    monkeypatch.setattr(attention, "has_flash", lambda *_: True)
    monkeypatch.setattr(gpu_layouts, "has_flash", lambda *_: True)
    layer, starts, x, dropouts = make_layer(dropout)
    launched: list[Any] = []
    with launching_nothing(launched):
        given = (starts, (longest,) * SEQUENCES, x, SHAPE.heads)
        laid = attention.lay_out(*given, window=window, dropout=dropouts.attention)
        tried = list(launched)
        del launched[:]
        layer(x, laid, dropouts).backward(torch.empty_like(x))
    names = {"_attend", "_attend_backward"}
    assert {each for each in launched if each[0] in names} == {each for each in tried if each[0] in names}
    assert {each[0] for each in tried} > names
