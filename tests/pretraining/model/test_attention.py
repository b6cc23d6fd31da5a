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
from support.kernels import threads
from support.pretraining_reference import random_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pretraining.model import cpu_kernels as kernels
from pretraining.model.attention import ByHeads, Grouped, Padded, lay_out
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout, make_row_keys
from pretraining.model.gpu_layouts import Packed, PackedTwice, has_flash
from pretraining.model.layout import Layout

WAYS: dict[str, Callable[..., Layout]] = {
    "grouped": lambda batch, *sight: Grouped(batch.starts, batch.lengths, *sight),
    "packed": lambda batch, *sight: Packed(batch.starts, max(batch.lengths), *sight),
    "padded": lambda batch, *sight: Padded(batch.starts, max(batch.lengths), len(batch.pieces), *sight),
}
GROUPED = pytest.param("grouped", marks=pytest.mark.kernels)
SIGHTS = [(False, None), (True, None), (False, 20), (True, 20)]
"""One way or both, and the window."""


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_kernels_are_called_as_they_demand(dtype: torch.dtype, sight: tuple[bool, int | None]) -> None:
    """Forward and backward, with stand-ins that refuse what the kernels refuse, and compute what they compute."""
    batch = random_batch([5, 70, 1, 33], 50)
    qkv, bias = inputs(109, 2 * 16, dtype)
    with FlashKernels() as kernels:
        found = WAYS["packed"](batch, *sight).attend(qkv, bias, 2, Dropout(0.1, NONE.keys))
        ours = [found.detach(), *gradients(found, qkv, bias)]
    wanted = attend_plainly(batch, qkv, bias, 2, *sight)
    assert furthest(ours, [wanted.detach(), *gradients(wanted, qkv, bias)]) < 0.02
    assert kernels.dropouts == [0.1, 0.1], "dropout of the forward pass, then of the backward pass"


def test_flash_kernels_compile_as_a_whole_and_all_windows_alike() -> None:
    batch, graphs = random_batch([5, 70], 50), list[torch.fx.GraphModule]()

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return lambda *_: (torch.zeros(75, 32),)

    for window in (None, 20, 30):
        attend = torch.compile(WAYS["packed"](batch, True, window).attend, backend=note, fullgraph=True, dynamic=True)
        attend(inputs(75, 32, torch.bfloat16)[0].detach(), None, 2, NONE)
    without, within = (graph.code for graph in graphs)
    assert "window_size_right" in within
    assert "window_size_right" not in without


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


@pytest.mark.kernels
@pytest.mark.parametrize("sight", [*SIGHTS, (False, 3)])
def test_gradients_of_attention_with_dropout_are_those_of_its_function(sight: tuple[bool, int | None]) -> None:
    """The backward pass draws the same masks again: finite differences would show if it did not."""
    lengths, heads, size = [9, 100, 4], 2, 4
    batch = random_batch(lengths, 50)
    dropout = Dropout(0.4, make_row_keys(1, batch.examples, batch.positions.numpy(), np.array(lengths)), site=3)
    qkv, bias = inputs(sum(lengths), heads * size)

    def loss(x: Tensor) -> Any:
        return WAYS["grouped"](batch, *sight).attend(x, bias, heads, dropout).square().sum()

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
    out = lay_out(batch.starts, batch.lengths, bad, 2).attend(bad, bias.detach(), 2, NONE)
    assert not out.isfinite().all()


@pytest.mark.parametrize("way", [GROUPED, "padded"])
def test_the_share_that_is_asked_is_dropped(way: str) -> None:
    """Where all pieces weigh the same and have the value 1, the output counts what is kept."""
    length, heads, share = 64, 8, 0.5
    batch = random_batch([length], 50)
    qkv = torch.cat([torch.zeros(length, 2 * heads * 4), torch.ones(length, heads * 4)], dim=1)
    dropout = Dropout(share, make_row_keys(1, batch.examples, batch.positions.numpy(), np.array([length])))
    torch.manual_seed(1)
    attended = WAYS[way](batch, False, None).attend(qkv, torch.zeros(3 * heads * 4), heads, dropout)
    kept = attended.view(length, heads, 4)[:, :, 0]
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.03)
    assert float(kept.std()) == pytest.approx(math.sqrt(share / (1 - share) / length), rel=0.2)


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


def by_heads(batch: Batch, one_way: bool = False, way: str | None = None, window: int | None = None) -> ByHeads:
    """The layout of a batch, that multiplies in some way (default: as this processor does)."""
    layout = ByHeads(batch.starts, batch.lengths, one_way, window)
    if way is not None:
        layout.kernel = f"attention_by_{way}"
    return layout


@pytest.mark.parametrize("way", [GROUPED, "padded", *ways()])
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    size=st.integers(0, 2),
    one_way=st.booleans(),
    window=st.none() | st.integers(0, 160),
)
@example(lengths=[1, 139], heads=1, size=0, one_way=False, window=None)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=True, window=None)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=False, window=None)
@example(lengths=[1, 700], heads=1, size=1, one_way=False, window=None)
@example(lengths=[1, 700], heads=1, size=1, one_way=False, window=64)
@example(lengths=[1, 700], heads=1, size=1, one_way=True, window=31)
@example(lengths=[1, 31, 32, 33, 65], heads=2, size=2, one_way=False, window=0)
@example(lengths=[128], heads=1, size=0, one_way=False, window=None)
def test_attention_over_ragged_sequences(
    way: str, lengths: list[int], heads: int, size: int, one_way: bool, window: int | None
) -> None:
    batch, in_bf16 = random_batch(lengths, 50), way not in WAYS
    hidden = heads * ((32, 64, 96) if in_bf16 else (4, 16, 20))[size]
    qkv, bias = inputs(sum(lengths), hidden, torch.bfloat16 if in_bf16 else torch.float32)
    wanted = attend_plainly(batch, qkv, bias, heads, one_way, window)
    *theirs, their_sum = [wanted.detach(), *gradients(wanted, qkv, bias)]
    layout = by_heads(batch, one_way, way, window) if in_bf16 else WAYS[way](batch, one_way, window)
    *ours, our_sum = found(layout, qkv if in_bf16 else qkv * 1, bias, heads)
    assert furthest(ours, theirs) < (0.02 if in_bf16 else 1e-5)
    rows = float(theirs[-1].abs().sum(0).max())  # the gradient by the bias sums them up, and they nearly cancel
    assert float((our_sum - their_sum).abs().max()) < (1e-2 if in_bf16 else 2e-6) * max(5, rows)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("way", [GROUPED, "padded", "flash", *ways()])
def test_the_first_sequences_may_see_one_way(way: str, first: int, window: int | None) -> None:
    """Forward and backward; of the flash kernels with stand-ins."""
    in_fp32, lengths = way in WAYS, [40, 1, 130, 5, 40]
    qkv, bias = inputs(sum(lengths), 64, torch.float32 if in_fp32 else torch.bfloat16)
    rows, batch = sum(lengths[:first]), random_batch(lengths, 50)
    parts = [
        attend_plainly(random_batch(part, 50), each, bias, 2, one_way, window)
        for part, each, one_way in ((lengths[:first], qkv[:rows], True), (lengths[first:], qkv[rows:], False))
        if part
    ]
    *wanted, their_sum = [torch.cat(parts).detach(), *gradients(torch.cat(parts), qkv, bias)]
    sight = (False, window, first)
    if way == "flash":
        with FlashKernels():
            *ours, our_sum = found(PackedTwice(batch.starts, batch.lengths, window, first), qkv, bias, 2)
    elif in_fp32:
        *ours, our_sum = found(WAYS[way](batch, *sight), qkv, bias, 2)
    else:
        by = ByHeads(batch.starts, batch.lengths, *sight)
        by.kernel = f"attention_by_{way}"
        *ours, our_sum = found(by, qkv, bias, 2)
    assert furthest(ours, wanted) < (1e-5 if in_fp32 else 0.02)
    most = max(5, float(wanted[-1].abs().sum(0).max()))
    assert float((our_sum - their_sum).abs().max()) < (2e-6 if in_fp32 else 1e-2) * most


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("sight", SIGHTS)
def test_what_is_dropped_is_the_same_by_all_our_kernels(way: str, sight: tuple[bool, int | None]) -> None:
    one_way, window = sight
    batch = random_batch([40, 7, 64, 130], 50)
    qkv, bias = inputs(len(batch.pieces), 128, torch.bfloat16)
    plain_qkv, plain_bias = (each.detach().float().requires_grad_() for each in (qkv, bias))
    wanted = found(Grouped(batch.starts, batch.lengths, *sight), plain_qkv, plain_bias, 2, some_dropout(batch))
    assert furthest(found(by_heads(batch, one_way, way, window), qkv, bias, 2, some_dropout(batch)), wanted) < 0.02


@pytest.mark.parametrize("way", [GROUPED, "heads"])
def test_a_window_drops_what_is_dropped_without_it(way: str) -> None:
    """Dropout numbers pieces by their place: values of 1 at one place show whether it was kept for each piece."""
    batch = random_batch([200], 50)
    qkv = torch.zeros(200, 3, 32)
    qkv[150, 2] = 1
    both = []
    for window in (None, 70):
        if way == "grouped":
            out = Grouped(batch.starts, batch.lengths, False, window).attend(
                qkv.view(200, 96), None, 1, some_dropout(batch)
            )
        elif kernels.small_products():
            rows = qkv.view(200, 96).bfloat16()
            out = by_heads(batch, window=window).attend(rows, None, 1, some_dropout(batch))
        else:
            return
        both.append(out[80:, 0] > 0)
    assert torch.equal(*both)
    assert 0.5 < float(both[0].float().mean()) < 0.9


@pytest.mark.kernels
def test_without_a_bias_it_is_a_bias_of_zeros() -> None:
    batch = random_batch([9, 30], 50)
    for dtype in (torch.float32, torch.bfloat16):
        qkv, bias = inputs(39, 64, dtype)
        layouts: list[Layout] = [WAYS[way](batch, False, None) for way in ("grouped", "padded")]
        for layout in [*layouts, *([by_heads(batch)] if ways() and dtype == torch.bfloat16 else [])]:
            *wanted, _ = found(layout, qkv, torch.zeros_like(bias).requires_grad_(), 2)
            out = layout.attend(qkv, None, 2, NONE)
            for ours, theirs in zip([out, *gradients(out, qkv)], wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@blocks
def test_what_lies_beyond_the_window_is_not_read() -> None:
    """Whole blocks are left out: what is no number there does not reach pieces far from it."""
    batch, (qkv, bias) = random_batch([400], 50), inputs(400, 64, torch.bfloat16)
    bad = qkv.detach().clone()
    bad[200] = math.nan
    bad.requires_grad_()
    out = by_heads(batch, window=40).attend(bad, bias, 2, NONE)
    out.backward(torch.ones_like(out))
    assert bad.grad is not None
    for each in (out, bad.grad):
        assert not each[160:241].isfinite().any(1).any()
        assert each[:96].isfinite().all()
        assert each[304:].isfinite().all()


@blocks
@pytest.mark.parametrize("sight", SIGHTS)
def test_bits_depend_neither_on_threads_nor_on_the_order_of_their_work(sight: tuple[bool, int | None]) -> None:
    batch = random_batch([128, 5, 77, 40, 128, 31], 50)
    qkv, bias = inputs(len(batch.pieces), 256, torch.bfloat16)
    layout, dropout = by_heads(batch, sight[0], window=sight[1]), some_dropout(batch)
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
    out.backward(slope)
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


@pytest.mark.parametrize(
    ("compiled", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)]
)
def test_a_batch_is_laid_out_with_a_window(compiled: bool, dtype: torch.dtype) -> None:
    batch, (qkv, bias) = random_batch([130, 40], 50), inputs(170, 64, dtype)
    layout = lay_out(batch.starts, batch.lengths, qkv[:, :64], 2, compiled, one_way=True, window=9)
    attend = torch.compile(layout.attend, backend="eager", fullgraph=True) if compiled else layout.attend
    wanted = attend_plainly(batch, qkv, bias, 2, True, 9)
    assert furthest([attend(qkv, bias, 2, NONE).detach()], [wanted.detach()]) < (
        1e-5 if dtype == torch.float32 else 0.02
    )
