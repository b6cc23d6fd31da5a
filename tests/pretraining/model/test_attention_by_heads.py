"""Attention a head at a time, against a softmax written out and against our kernels in fp32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention import NONE, attend_plainly, furthest, gradients, inputs
from support.kernels import threads
from support.pretraining_reference import random_batch
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import ByHeads, Grouped, Layout, lay_out
from pretraining.model.batch import Batch
from pretraining.model.fused import Dropout, make_row_keys

blocks = pytest.mark.skipif(not kernels.small_products(), reason="no products of bf16 in this processor or compiler")


def some_dropout(batch: Batch, spare: int = 0) -> Dropout:
    keys = make_row_keys(1, batch.examples, batch.positions.numpy(), np.array(batch.lengths))
    return Dropout(0.3, keys, site=3).add_spare_rows(spare)


def found(layout: Layout, qkv: Tensor, bias: Tensor, heads: int, dropout: Dropout = NONE) -> list[Tensor]:
    """What attention gives, and its gradients."""
    out = layout.attend(qkv, bias, heads, dropout)
    return [out.detach(), *gradients(out, qkv, bias)]


def ways() -> list[str]:
    """How this processor can multiply: one with tiles has lanes too, which are taken where Linux forbids tiles."""
    return {"tiles": ["tiles", "lanes"], "lanes": ["lanes"]}.get(kernels.small_products() or "", [])


def by_heads(batch: Batch, one_way: bool = False, way: str | None = None) -> ByHeads:
    """The layout of a batch, that multiplies in some way (default: as this processor does)."""
    layout = ByHeads(batch.starts, batch.lengths, one_way)
    if way is not None:
        layout.kernel = f"attention_by_{way}"
    return layout


@pytest.mark.parametrize("way", ways())
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    size=st.sampled_from([32, 64, 96]),
    one_way=st.booleans(),
)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=96, one_way=True)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=96, one_way=False)
@example(lengths=[1, 700], heads=1, size=64, one_way=False)
@example(lengths=[128], heads=1, size=32, one_way=False)
def test_attention_over_ragged_sequences(way: str, lengths: list[int], heads: int, size: int, one_way: bool) -> None:
    batch = random_batch(lengths, 50)
    qkv, bias = inputs(sum(lengths), heads * size, torch.bfloat16)
    wanted = attend_plainly(batch, qkv, bias, heads, one_way)
    *theirs, their_sum = [wanted.detach(), *gradients(wanted, qkv, bias)]
    *ours, our_sum = found(by_heads(batch, one_way, way), qkv, bias, heads)
    assert furthest(ours, theirs) < 0.02
    rows = float(theirs[-1].abs().sum(0).max())  # the gradient by the bias sums them up, and they nearly cancel
    assert float((our_sum - their_sum).abs().max()) < 1e-2 * max(5, rows)


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("one_way", [False, True])
def test_what_is_dropped_is_the_same_by_all_our_kernels(way: str, one_way: bool) -> None:
    batch = random_batch([40, 7, 64, 130], 50)
    qkv, bias = inputs(len(batch.pieces), 128, torch.bfloat16)
    plain_qkv, plain_bias = (each.detach().float().requires_grad_() for each in (qkv, bias))
    wanted = found(Grouped(batch.starts, batch.lengths, one_way), plain_qkv, plain_bias, 2, some_dropout(batch))
    assert furthest(found(by_heads(batch, one_way, way), qkv, bias, 2, some_dropout(batch)), wanted) < 0.02


@blocks
@pytest.mark.parametrize("one_way", [False, True])
def test_bits_depend_neither_on_threads_nor_on_the_order_of_their_work(one_way: bool) -> None:
    batch = random_batch([128, 5, 77, 40, 128, 31], 50)
    qkv, bias = inputs(len(batch.pieces), 256, torch.bfloat16)
    layout, dropout = by_heads(batch, one_way), some_dropout(batch)
    runs = []
    for count in (1, 2, 3, 2):
        with threads(count):
            runs.append(found(layout, qkv, bias, 4, dropout))
    for again in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True))


@blocks
def test_the_highest_of_huge_scores_has_the_whole_share() -> None:
    batch = random_batch([3], 50)
    rows = torch.zeros(3, 3, 32)
    rows[:, 0], rows[:, 1, 0], rows[:, 2] = 2e5, 1e5, torch.arange(3.0)[:, None]
    rows[2, 1] = 1e5  # the last key is the highest by far
    qkv = rows.view(3, 96).bfloat16().requires_grad_()
    out = by_heads(batch).attend(qkv, torch.zeros(96, dtype=torch.bfloat16, requires_grad=True), 1, NONE)
    assert torch.equal(out.float(), torch.full((3, 32), 2.0))
    (grad,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    wanted = torch.tensor([0.0, 0.0, 3.0])[:, None].expand(3, 32)
    torch.testing.assert_close(grad.view(3, 3, 32)[:, 2].float(), wanted, rtol=0, atol=1e-30)


@blocks
def test_spare_rows_stay_zeros() -> None:
    batch = random_batch([9, 30], 50)
    qkv, bias = inputs(39 + 9, 64, torch.bfloat16)
    out, grad, _ = found(by_heads(batch), qkv, bias, 2, some_dropout(batch, spare=9))
    assert not out[39:].any()
    assert not grad[39:].any()


@blocks
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["query", "key", "value", "gradient"])
@pytest.mark.parametrize("one_way", [False, True])
def test_what_is_no_number_stays_visible_and_in_its_sequence(poison: float, part: str, one_way: bool) -> None:
    batch, (qkv, bias) = random_batch([33, 40], 50), inputs(73, 64, torch.bfloat16)
    bad, slope = qkv.detach().clone(), torch.randn(73, 64).bfloat16()
    if part == "gradient":
        slope[5, 3] = poison
    else:
        bad[5, 3 + 64 * ("query", "key", "value").index(part)] = poison
    bad.requires_grad_()
    out = by_heads(batch, one_way).attend(bad, bias, 2, some_dropout(batch))
    out.backward(slope)  # type: ignore[no-untyped-call]
    assert bad.grad is not None
    assert out[5].isfinite().all() == (part == "gradient")
    assert not bad.grad[5].isfinite().all()
    assert out[33:].isfinite().all()
    assert bad.grad[33:].isfinite().all()


@blocks
def test_they_are_taken_where_heads_are_wide_enough() -> None:
    batch = random_batch([4], 50)
    for hidden, dtype, layout in [
        (64, torch.bfloat16, ByHeads),
        (32, torch.bfloat16, Grouped),
        (64, torch.float32, Grouped),
    ]:
        assert type(lay_out(batch.starts, batch.lengths, torch.empty(4, hidden, dtype=dtype), heads=2)) is layout
