"""The layouts on a GPU from compute capability 8.0 on, in 16 bits, whose kernels need no padding."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pretraining import devices
from pretraining.model import gpu_operations as gpu
from pretraining.model.dropout import KEEPS, Dropout
from pretraining.model.layout import WHOLE, Attend, Layout, add_bias, split_ways
from pretraining.model.own_backward import Forward, Gradients, with_backward

FLASH_SIZE = 192
"""The widest head that the flash kernels support on all their GPUs."""
OWN_SIZES, OWN_PIECES = (32, 64, 128), 512
"""The widths of heads that our kernels support, and the most pieces of a sequence for which they are made."""

_choice: Literal["auto", "flash", "own"] = "auto"


def choose(choice: Literal["auto", "flash", "own"]) -> None:
    """Chooses the kernels of attention in this process, where a GPU has both."""
    global _choice
    _choice = choice


def takes_own(
    states: Tensor, heads: int, longest: int, dropout: Dropout = KEEPS, first: int = 0, window: int | None = None
) -> bool:
    """Whether our kernels attend to sequences of at most `longest` pieces with these hidden states; `first` and
    `window` are those of `Own`."""
    size = states.shape[1] // heads
    if _choice != "own" or size not in OWN_SIZES or longest > OWN_PIECES or not has_flash(states, heads):
        return False
    alike = 64 if longest <= 64 else 128 if longest <= 128 else OWN_PIECES  # these are computed by the same kernels
    form = (heads, alike, min(first, 1), WHOLE if window is None else window)
    return gpu.usable("attention", states, dropout.for_kernels, form)


def has_flash(states: Tensor, heads: int) -> bool:
    """Whether this PyTorch has the flash kernels, and they support the type, the head width and the GPU of these
    states."""
    size = states.shape[1] // heads
    fits = states.is_cuda and states.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= FLASH_SIZE
    return fits and devices.has_flash(states.device)


def note_choice(states: Tensor, heads: int, longest: int, dropout: float = 0.0) -> str:
    """Returns a line for the beginning of a run where our kernels are chosen and others attend; "" elsewhere."""
    keys = torch.zeros(states.shape[0], dtype=torch.int32)
    if _choice != "own" or not states.is_cuda or takes_own(states, heads, longest, Dropout(dropout, keys)):
        return ""
    return (
        f'compute.attention = "own": needs heads of {", ".join(map(str, OWN_SIZES))} numbers, at most {OWN_PIECES} '
        "pieces, 16 bits, Triton, and a GPU of compute capability 8.0 or later; PyTorch attends instead"
    )


class Packed(Layout):
    """Sequences without padding, for the flash kernels, which take the starts of sequences."""

    def __init__(self, starts: Tensor, longest: int, one_way: bool = False, window: int | None = None):
        self.starts, self.longest, self.one_way = starts, longest, one_way
        self.sight = {} if window is None else {"window_size_left": window, "window_size_right": window * (not one_way)}

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        query, key, value = add_bias(qkv, bias).view(len(qkv), 3, heads, -1).unbind(1)  # (n, heads, size) each
        where = (self.starts, self.starts, self.longest, self.longest)
        # scaled_dot_product_attention calls it too, but takes the host longer than the GPU computes
        out, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *where, dropout.probability, self.one_way, False, **self.sight
        )
        return out.reshape(len(qkv), -1)

    def attends_sums(self, states: Tensor) -> Attend | None:
        """Returns the function where one of our kernels can join the gradients."""
        return self._attend_sums if gpu.usable("join", states) else None

    def _attend_sums(self, sums: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        where = (self.starts, self.starts, self.longest, self.longest, dropout.probability, self.one_way)
        bias = sums.new_empty(sums.shape[1]) if bias is None else bias  # only the gradient would be read
        return _flash_attention(sums, bias, heads, where, self.sight)


class PackedTwice(Layout):
    """The flash kernels once for the sequences that see one way, and once for the others."""

    def __init__(self, starts: Tensor, lengths: tuple[int, ...], window: int | None, first: int):
        ways = split_ways(len(lengths), False, first)
        self.sizes = [sum(lengths[part]) for part, _ in ways]
        bounds = (starts[: first + 1], starts[first:] - starts[first])
        inputs = zip(ways, bounds, strict=True)
        self.parts = [Packed(each, max(lengths[part]), one_way, window) for (part, one_way), each in inputs]

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        rows = zip(self.parts, qkv.split(self.sizes), strict=True)
        return torch.cat([part.attend(each, bias, heads, dropout) for part, each in rows])

    def attends_sums(self, states: Tensor) -> Attend | None:
        return self._attend_sums if gpu.usable("join", states) else None

    def _attend_sums(self, sums: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        rows = zip(self.parts, sums.split(self.sizes), strict=True)
        return torch.cat([part._attend_sums(each, bias, heads, dropout) for part, each in rows])


class Own(Layout):
    """Our kernels for short sequences, which draw the dropout of a CPU. In the first sequences a piece may see one
    way."""

    def __init__(self, starts: Tensor, longest: int, first: int = 0, window: int | None = None):
        self.where = (starts, longest, first, WHOLE if window is None else window)

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        return self._attend_sums(add_bias(qkv, bias), None, heads, dropout)

    def attends_sums(self, states: Tensor) -> Attend:  # noqa: ARG002
        return self._attend_sums

    def _attend_sums(self, sums: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        return gpu.attend(sums, bias, heads, self.where, dropout.for_kernels)


@with_backward
def _flash_attention(sums: Tensor, bias: Tensor, heads: int, where: tuple[Any, ...], sight: dict[str, int]) -> Forward:
    """The flash kernels on queries, keys and values that include their bias; one kernel joins the gradients."""
    parts = sums.view(len(sums), 3, heads, -1).unbind(1)
    out, exponents, *state, _ = torch.ops.aten._flash_attention_forward(*parts, *where, False, **sight)
    saved = (*parts, out, exponents, *state, bias)
    return out.view(len(sums), -1), saved, partial(_flash_attention_backward, where, sight)


def _flash_attention_backward(where: tuple[Any, ...], sight: dict[str, int], grad: Tensor, *saved: Tensor) -> Gradients:
    query, key, value, out, exponents, *state, bias = saved
    query_grad, key_grad, value_grad = torch.ops.aten._flash_attention_backward(
        grad.view(out.shape), query, key, value, out, exponents, *where, *state, **sight
    )
    return gpu.join(query_grad, key_grad, value_grad, bias)
