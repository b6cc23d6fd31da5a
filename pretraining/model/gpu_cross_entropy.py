"""The loss of predictions on a GPU, in Triton: logits are read twice, and their gradient overwrites them.

No other tensor of the size of the logits is allocated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretraining.model.gpu_kernels import _read
from pretraining.model.own_backward import Losses

CHUNK = 4096
"""The most logits of a row that a program holds at a time."""
LOWEST = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=["vocabulary"])
def _cross_entropy(
    logits, bias, labels, losses, right, vocabulary, slopes: tl.constexpr, width: tl.constexpr, chunk: tl.constexpr
):
    """Computes the loss of a row, whether the first of its largest logits is the label, and the gradient of its logits.

    The loss of a label outside the vocabulary is NaN.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, chunk)
    begin, label = row * width, tl.load(labels + row)
    known = (label >= 0) & (label < vocabulary)
    answer = _read(logits, begin + label, known) + _read(bias, label, known)
    most, total = tl.full([chunk], LOWEST, tl.float32), tl.zeros([chunk], tl.float32)
    place = tl.zeros([chunk], tl.int32)  # where each column of the chunks is largest
    for first in range(0, width, chunk):
        column = first + columns
        inside = column < vocabulary
        there = column < width  # a constant bound lets Triton read several at once; the vocabulary is no constant
        value = tl.where(inside, _read(logits, begin + column, there) + _read(bias, column, there), LOWEST)
        higher = tl.maximum(most, value)
        total = total * tl.exp(most - higher) + tl.where(inside, tl.exp(value - higher), 0.0)
        place = tl.where(value > most, column, place)
        most = higher
    peak = tl.max(most, 0)
    whole = peak + tl.log(tl.sum(total * tl.exp(most - peak), 0))
    tl.store(losses + row, tl.where(known, whole - answer, float("nan")))
    tl.store(right + row, (tl.min(tl.where(most == peak, place, width), 0) == label).to(tl.int8))
    if slopes:
        for first in range(0, width, chunk):
            column = first + columns
            inside = column < vocabulary
            there = column < width
            value = _read(logits, begin + column, there) + _read(bias, column, there)
            share = tl.where(inside, tl.exp(value - whole), 0.0)
            tl.store(logits + begin + column, share - (column == label).to(tl.float32), mask=there)


def cross_entropies(logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool) -> Losses:
    """Computes the loss of every row, (m,) in fp32, and whether its prediction is right. The bias is added here.
    With `slopes`, the gradient of the logits replaces them."""
    rows, width = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    right = logits.new_empty(rows, dtype=torch.int8)
    if rows:
        chunk = min(CHUNK, triton.next_power_of_2(width))
        sizes = {"slopes": slopes, "width": width, "chunk": chunk}
        _cross_entropy[(rows,)](logits, bias, labels, losses, right, vocabulary, **sizes, num_warps=8)
    return losses, right
