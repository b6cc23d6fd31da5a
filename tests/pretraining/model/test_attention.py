"""Attention against a softmax written out, in every way that there is, those for GPUs too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention import NONE, attend_plainly, furthest, gradients, inputs
from support.flash import FlashKernels
from support.pretraining_reference import random_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pretraining.model.attention import Grouped, Layout, Packed, Padded, has_flash, lay_out
from pretraining.model.batch import Batch
from pretraining.model.fused import Dropout, make_row_keys

WAYS: dict[str, Callable[[Batch, bool], Layout]] = {
    "grouped": lambda batch, one_way: Grouped(batch.starts, batch.lengths, one_way),
    "packed": lambda batch, one_way: Packed(batch.starts, max(batch.lengths), one_way),
    "padded": lambda batch, one_way: Padded(batch.starts, max(batch.lengths), len(batch.pieces), one_way),
}


def attend(batch: Batch, qkv: Tensor, bias: Tensor, heads: int, dropout: Dropout) -> Tensor:
    """As on this machine."""
    return lay_out(batch.starts, batch.lengths, qkv, heads).attend(qkv, bias, heads, dropout)


@pytest.mark.parametrize("way", ["grouped", "padded"])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    size=st.sampled_from([4, 16, 20]),
    one_way=st.booleans(),
)
@example(lengths=[1, 139], heads=1, size=4, one_way=False)
def test_attention_over_ragged_sequences(way: str, lengths: list[int], heads: int, size: int, one_way: bool) -> None:
    batch = random_batch(lengths, 50)
    qkv, bias = inputs(sum(lengths), heads * size)
    wanted = attend_plainly(batch, qkv, bias, heads, one_way)
    found = WAYS[way](batch, one_way).attend(qkv * 1, bias, heads, NONE)
    (*ours, our_sum), (*theirs, their_sum) = ([out.detach(), *gradients(out, qkv, bias)] for out in (found, wanted))
    assert furthest(ours, theirs) < 1e-5
    rows = float(theirs[-1].abs().sum(0).max())  # the gradient by the bias sums them up, and they nearly cancel
    assert float((our_sum - their_sum).abs().max()) < 2e-6 * max(5, rows)


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_kernels_are_called_as_they_demand(dtype: torch.dtype, one_way: bool) -> None:
    """Forward and backward, with stand-ins that refuse what the kernels refuse, and compute what they compute."""
    batch = random_batch([5, 70, 1, 33], 50)
    qkv, bias = inputs(109, 2 * 16, dtype)
    with FlashKernels() as kernels:
        found = WAYS["packed"](batch, one_way).attend(qkv, bias, 2, Dropout(0.1, NONE.keys))
        ours = [found.detach(), *gradients(found, qkv, bias)]
    wanted = attend_plainly(batch, qkv, bias, 2, one_way)
    assert furthest(ours, [wanted.detach(), *gradients(wanted, qkv, bias)]) < 0.02
    assert kernels.dropouts == [0.1, 0.1], "dropout of the forward pass, then of the backward pass"


def test_this_torch_has_the_flash_operator_that_we_call() -> None:
    """With what we give by place and take first; the rest has defaults. Other versions are tested where installed."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    by_place = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert by_place == ("query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask".split())
    assert all(argument.has_default_value() for argument in schema.arguments if argument.kwarg_only)
    assert schema.returns[0].name == "output"


@pytest.mark.parametrize(
    ("built", "capability", "dtype", "size", "flash"),
    [
        (True, (9, 0), torch.bfloat16, 64, True),
        (True, (8, 0), torch.float16, 64, True),
        (True, (7, 5), torch.float16, 64, False),  # T4
        (True, (9, 0), torch.float32, 64, False),
        (True, (9, 0), torch.bfloat16, 20, False),
        (True, (8, 6), torch.bfloat16, 256, False),
        (False, (9, 0), torch.bfloat16, 64, False),
    ],
)
def test_the_flash_kernels_compute_what_they_can(
    monkeypatch: pytest.MonkeyPatch,
    built: bool,
    capability: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    flash: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    with FakeTensorMode():
        assert has_flash(torch.empty(9, 2 * size, device="cuda", dtype=dtype), heads=2) == flash


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gpus_without_flash_kernels_get_padded_sequences(dtype: torch.dtype) -> None:
    """Forward and backward: meta tensors go through the operations that a GPU goes through."""
    batch = random_batch([5, 70, 1, 33], 50).to("meta")
    qkv, bias = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in ((109, 96), (96,)))
    layout = lay_out(batch.starts, batch.lengths, qkv[:, :32], heads=2)
    assert isinstance(layout, Padded)
    out = layout.attend(qkv, bias, 2, Dropout(0.1, NONE.keys))
    assert (out.shape, out.dtype) == ((109, 32), dtype)
    out.sum().backward()
    for tensor in (qkv, bias):
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype


@pytest.mark.parametrize("one_way", [False, True])
def test_gradients_of_attention_with_dropout_are_those_of_its_function(one_way: bool) -> None:
    """The backward pass draws the same masks again: finite differences would show if it did not."""
    lengths, heads, size = [9, 30, 4], 2, 4
    batch = random_batch(lengths, 50)
    dropout = Dropout(0.4, make_row_keys(1, batch.examples, batch.positions.numpy(), np.array(lengths)), site=3)
    qkv, bias = inputs(sum(lengths), heads * size)

    def loss(x: Tensor) -> Any:
        return WAYS["grouped"](batch, one_way).attend(x, bias, heads, dropout).square().sum()

    (slopes,) = torch.autograd.grad(loss(qkv), [qkv])
    direction, step = slopes / slopes.square().mean().sqrt(), 2e-3
    with torch.no_grad():
        slope = (loss(qkv + step * direction) - loss(qkv - step * direction)) / (2 * step)
    assert float((slopes * direction).sum()) == pytest.approx(float(slope), rel=2e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(poison: float) -> None:
    qkv, bias = inputs(4, 32)
    bad = qkv.detach().clone()
    bad[2, 5] = poison
    assert not attend(random_batch([4], 50), bad, bias.detach(), 2, NONE).isfinite().all()


@pytest.mark.parametrize("way", ["grouped", "padded"])
def test_the_share_that_is_asked_is_dropped(way: str) -> None:
    """Where all pieces weigh the same and have the value 1, the output counts what is kept."""
    length, heads, share = 64, 8, 0.5
    batch = random_batch([length], 50)
    qkv = torch.cat([torch.zeros(length, 2 * heads * 4), torch.ones(length, heads * 4)], dim=1)
    dropout = Dropout(share, make_row_keys(1, batch.examples, batch.positions.numpy(), np.array([length])))
    torch.manual_seed(1)
    kept = (
        WAYS[way](batch, False).attend(qkv, torch.zeros(3 * heads * 4), heads, dropout).view(length, heads, 4)[:, :, 0]
    )
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(kept.std()) == pytest.approx(math.sqrt(share / (1 - share) / length), rel=0.2)
