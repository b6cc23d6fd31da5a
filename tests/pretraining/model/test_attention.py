"""Attention against a softmax written out, in every way that there is, those for GPUs too."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention import FlashKernels, assert_attends, attend_plainly, furthest, inputs, with_slopes
from support.operations import NONE, threads
from support.pretraining_reference import random_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import ByHeads, Grouped, Padded, lay_out
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout, make_row_keys
from pretraining.model.gpu_layouts import Packed, PackedTwice, has_flash
from pretraining.model.layout import Layout

SIGHTS = [(False, None), (True, None), (False, 20), (True, 20)]
"""One way or both, and the window."""
GROUPED = pytest.param("grouped", marks=pytest.mark.kernels)
TILES_AND_LANES = {"tiles": ["tiles", "lanes"], "lanes": ["lanes"]}.get(kernels.small_products() or "", [])
"""How this processor can multiply: one with tiles has lanes too, which are taken where Linux forbids tiles."""
blocks = pytest.mark.skipif(not TILES_AND_LANES, reason="no products of bf16 in this processor or compiler")


def make_layout(way: str, batch: Batch, one_way: bool = False, window: int | None = None, first: int = 0) -> Layout:
    """The layout of a batch; `heads` multiplies as this processor does, `tiles` and `lanes` in that way."""
    sight = (one_way, window, first)
    if way == "padded":
        return Padded(batch.starts, max(batch.lengths), len(batch.pieces), *sight)
    if way == "packed":
        twice = PackedTwice(batch.starts, batch.lengths, window, first) if first else None
        return twice or Packed(batch.starts, max(batch.lengths), one_way, window)
    layout = (Grouped if way == "grouped" else ByHeads)(batch.starts, batch.lengths, *sight)
    if isinstance(layout, ByHeads) and way != "heads":
        layout.kernel = f"attention_by_{way}"
    return layout


def some_dropout(batch: Batch, probability: float = 0.3, spare: int = 0) -> Dropout:
    keys = make_row_keys(1, batch.examples, batch.positions.numpy(), np.array(batch.lengths))
    return Dropout(probability, keys, site=3).add_spare_rows(spare)


def attended(layout: Layout, qkv: Tensor, bias: Tensor, heads: int, dropout: Dropout = NONE) -> list[Tensor]:
    """What attention gives, and its gradients."""
    return with_slopes(layout.attend(qkv * 1, bias, heads, dropout), qkv, bias)


@pytest.mark.parametrize(
    ("dtype", "sight"),
    [(torch.float16, (True, 20)), *((torch.bfloat16, each) for each in [*SIGHTS, (False, None, 1), (False, 20, 4)])],
)
def test_flash_kernels_are_called_as_they_demand(dtype: torch.dtype, sight: Any) -> None:
    """Forward and backward, with stand-ins that refuse what the kernels refuse, and compute what they compute."""
    batch = random_batch([5, 70, 1, 33, 5], 50)
    qkv, bias = inputs(114, 2 * 16, dtype)
    with FlashKernels() as flash:
        ours = attended(make_layout("packed", batch, *sight), qkv, bias, 2, Dropout(0.1, NONE.keys))
    theirs = attend_plainly(batch, qkv, bias, 2, *sight)
    assert_attends(ours, theirs, of_sum=1e-2, tolerance=0.02)
    assert furthest(ours, theirs) < 0.02
    assert set(flash.dropouts) == {0.1}, "dropout of the forward pass, then of the backward pass"
    assert len(flash.dropouts) == (4 if sight[2:] else 2)


def test_this_torch_has_the_flash_operator_that_we_call() -> None:
    """With what we give by place and take first; the rest has defaults. Other versions are tested where installed."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    by_place = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert by_place == ("query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask".split())
    assert all(argument.has_default_value() for argument in schema.arguments if argument.kwarg_only)
    assert schema.returns[0].name == "output"
    for operator in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward):
        by_name = {argument.name for argument in operator.default._schema.arguments if argument.kwarg_only}
        assert {"window_size_left", "window_size_right"} <= by_name


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
    monkeypatch: pytest.MonkeyPatch, built: bool, capability: Any, dtype: torch.dtype, size: int, flash: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    with FakeTensorMode():
        assert has_flash(torch.empty(9, 2 * size, device="cuda", dtype=dtype), heads=2) == flash


@pytest.mark.parametrize("way", [GROUPED, "padded", *TILES_AND_LANES])
@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    size=st.integers(0, 2),
    one_way=st.booleans(),
    window=st.none() | st.integers(0, 160),
    first=st.sampled_from([0, 0, 1, 4]),
)
@example(lengths=[1, 139], heads=1, size=0, one_way=False, window=None, first=0)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=True, window=None, first=0)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=False, window=None, first=0)
@example(lengths=[1, 700], heads=1, size=1, one_way=False, window=None, first=0)
@example(lengths=[1, 700], heads=1, size=1, one_way=False, window=64, first=0)
@example(lengths=[1, 700], heads=1, size=1, one_way=True, window=31, first=0)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=False, window=0, first=0)
@example(lengths=[128], heads=1, size=0, one_way=False, window=None, first=0)
@example(lengths=[40, 1, 130, 5, 40], heads=2, size=0, one_way=False, window=None, first=1)
@example(lengths=[40, 1, 130, 5, 40], heads=2, size=0, one_way=False, window=20, first=4)
def test_attention_over_ragged_sequences(
    way: str, lengths: list[int], heads: int, size: int, one_way: bool, window: int | None, first: int
) -> None:
    """In the first sequences a piece may see one way, in others both."""
    batch, in_bf16, sight = random_batch(lengths, 50), way in TILES_AND_LANES, (one_way, window, first)
    hidden = heads * ((32, 64, 96) if in_bf16 else (4, 16, 20))[size]
    qkv, bias = inputs(sum(lengths), hidden, torch.bfloat16 if in_bf16 else torch.float32)
    ours = attended(make_layout(way, batch, *sight), qkv, bias, heads)
    of_sum, tolerance = (1e-2, 0.02) if in_bf16 else (2e-6, 1e-5)
    assert_attends(ours, attend_plainly(batch, qkv, bias, heads, *sight), of_sum, tolerance)


@pytest.mark.kernels
@pytest.mark.parametrize("sight", [*SIGHTS, (False, 3)])
def test_gradients_of_attention_with_dropout_are_those_of_its_function(sight: tuple[bool, int | None]) -> None:
    """The backward pass draws the same masks again: finite differences would show if it did not."""
    batch, heads = random_batch([9, 100, 4], 50), 2
    qkv, bias = inputs(113, 4 * heads)

    def loss(x: Tensor) -> Any:
        return make_layout("grouped", batch, *sight).attend(x, bias, heads, some_dropout(batch, 0.4)).square().sum()

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
    batch = random_batch([4], 50)
    assert not lay_out(batch.starts, batch.lengths, bad, 2).attend(bad, bias.detach(), 2, NONE).isfinite().all()


@pytest.mark.parametrize("way", [GROUPED, "padded"])
def test_the_share_that_is_asked_is_dropped(way: str) -> None:
    """Where all pieces weigh the same and have the value 1, the output counts what is kept."""
    length, heads, share = 64, 8, 0.5
    batch = random_batch([length], 50)
    qkv = torch.cat([torch.zeros(length, 2 * heads * 4), torch.ones(length, heads * 4)], dim=1)
    torch.manual_seed(1)
    attend = make_layout(way, batch).attend
    kept = attend(qkv, torch.zeros(3 * heads * 4), heads, some_dropout(batch, share)).view(length, heads, 4)[:, :, 0]
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(kept.std()) == pytest.approx(math.sqrt(share / (1 - share) / length), rel=0.2)


@pytest.mark.parametrize("way", TILES_AND_LANES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_what_is_dropped_is_the_same_by_all_our_kernels(way: str, sight: tuple[bool, int | None]) -> None:
    batch = random_batch([40, 7, 64, 130], 50)
    both = []
    for kind, dtype in (("grouped", torch.float32), (way, torch.bfloat16)):
        qkv, bias = (each.detach().to(dtype).requires_grad_() for each in inputs(241, 128, torch.bfloat16))
        both.append(attended(make_layout(kind, batch, *sight), qkv, bias, 2, some_dropout(batch)))
    assert furthest(both[1], both[0]) < 0.02


@pytest.mark.parametrize("way", [GROUPED, pytest.param("heads", marks=blocks)])
def test_a_window_drops_what_is_dropped_without_it(way: str) -> None:
    """Dropout numbers pieces by their place: values of 1 at one place show whether it was kept for each piece."""
    batch, qkv, both = random_batch([200], 50), torch.zeros(200, 3, 32), []
    qkv[150, 2] = 1
    for window in (None, 70):
        rows = qkv.view(200, 96).to(torch.bfloat16 if way == "heads" else torch.float32, copy=True)
        out = make_layout(way, batch, False, window).attend(rows, None, 1, some_dropout(batch))
        both.append(out[80:, 0] > 0)
    assert torch.equal(*both)
    assert 0.5 < float(both[0].float().mean()) < 0.9


@pytest.mark.parametrize("way", [GROUPED, "padded", pytest.param("heads", marks=blocks)])
def test_without_a_bias_it_is_a_bias_of_zeros(way: str) -> None:
    batch = random_batch([9, 30], 50)
    for dtype in [torch.float32, torch.bfloat16][way == "heads" :]:
        qkv, bias = inputs(39, 64, dtype)
        layout = make_layout(way, batch)
        *wanted, _ = attended(layout, qkv, torch.zeros_like(bias).requires_grad_(), 2)
        assert all(map(torch.equal, with_slopes(layout.attend(qkv * 1, None, 2, NONE), qkv), wanted))


@blocks
def test_what_lies_beyond_the_window_is_not_read() -> None:
    """Whole blocks are left out: what is no number there does not reach pieces far from it."""
    batch, (qkv, bias) = random_batch([400], 50), inputs(400, 64, torch.bfloat16)
    bad = qkv.detach().clone()
    bad[200] = math.nan
    for each in attended(make_layout("heads", batch, False, 40), bad.requires_grad_(), bias, 2)[:2]:
        assert not each[160:241].isfinite().any(1).any()
        assert each[:96].isfinite().all()
        assert each[304:].isfinite().all()


@blocks
@pytest.mark.parametrize("sight", SIGHTS)
def test_bits_depend_neither_on_threads_nor_on_the_order_of_their_work(sight: tuple[bool, int | None]) -> None:
    batch = random_batch([128, 5, 77, 40, 128, 31], 50)
    (qkv, bias), layout, runs = inputs(409, 256, torch.bfloat16), make_layout("heads", batch, *sight), []
    for count in (1, 2, 3, 2):
        with threads(count):
            runs.append(attended(layout, qkv, bias, 4, some_dropout(batch)))
    assert all(torch.equal(one, other) for again in runs[1:] for one, other in zip(runs[0], again, strict=True))


@blocks
def test_the_highest_of_huge_scores_has_the_whole_share() -> None:
    rows = torch.zeros(3, 3, 32)
    rows[:, 0], rows[:, 1, 0], rows[:, 2] = 2e5, 1e5, torch.arange(3.0)[:, None]
    rows[2, 1] = 1e5  # the last key is the highest by far
    qkv = rows.view(3, 96).bfloat16().requires_grad_()
    out = make_layout("heads", random_batch([3], 50)).attend(qkv, None, 1, NONE)
    assert torch.equal(out.float(), torch.full((3, 32), 2.0))
    (grad,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    wanted = torch.tensor([0.0, 0.0, 3.0])[:, None].expand(3, 32)
    torch.testing.assert_close(grad.view(3, 3, 32)[:, 2].float(), wanted, rtol=0, atol=1e-30)


@blocks
def test_spare_rows_stay_zeros() -> None:
    batch, (qkv, bias) = random_batch([9, 30], 50), inputs(39 + 9, 64, torch.bfloat16)
    out, grad, _ = attended(make_layout("heads", batch), qkv, bias, 2, some_dropout(batch, spare=9))
    assert not out[39:].any()
    assert not grad[39:].any()


@blocks
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("part", "one_way"), [("query", False), ("key", True), ("value", False), ("gradient", True), ("gradient", False)]
)
def test_what_is_no_number_stays_visible_and_in_its_sequence(poison: float, part: str, one_way: bool) -> None:
    batch, (qkv, bias) = random_batch([33, 40], 50), inputs(73, 64, torch.bfloat16)
    bad, slope = qkv.detach().clone(), torch.randn(73, 64).bfloat16()
    if part == "gradient":
        slope[5, 3] = poison
    else:
        bad[5, 3 + 64 * ("query", "key", "value").index(part)] = poison
    out = make_layout("heads", batch, one_way).attend(bad.requires_grad_(), bias, 2, some_dropout(batch))
    (grad,) = torch.autograd.grad(out, bad, slope)
    assert out[5].isfinite().all() == (part == "gradient")
    assert not grad[5].isfinite().all()
    assert out[33:].isfinite().all()
    assert grad[33:].isfinite().all()


@blocks
@pytest.mark.parametrize(
    ("hidden", "dtype", "layout"),
    [(64, torch.bfloat16, ByHeads), (32, torch.bfloat16, Grouped), (64, torch.float32, Grouped)],
)
def test_they_are_taken_where_heads_are_wide_enough(hidden: int, dtype: torch.dtype, layout: type) -> None:
    batch = random_batch([4], 50)
    assert type(lay_out(batch.starts, batch.lengths, torch.empty(4, hidden, dtype=dtype), heads=2)) is layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_laid_out_with_a_window(dtype: torch.dtype) -> None:
    batch, (qkv, bias) = random_batch([130, 40], 50), inputs(170, 64, dtype)
    layout = lay_out(batch.starts, batch.lengths, qkv[:, :64], 2, one_way=True, window=9)
    close = 1e-5 if dtype == torch.float32 else 0.02
    found, (wanted, *_) = layout.attend(qkv, bias, 2, NONE).detach(), attend_plainly(batch, qkv, bias, 2, True, 9)
    assert furthest([found], [wanted]) < close
