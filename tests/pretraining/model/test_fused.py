"""Operations between products by PyTorch, our kernels for CPUs and those for GPUs, against fp64; masks of dropout."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import (
    NONE,
    by_each,
    by_ours,
    compute_by,
    exactly,
    keys_of,
    place,
    results,
    same,
    tensors,
    threads,
)
from support.pretraining_reference import gradient, random_batch
from support.processes import spawn
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout, make_row_keys
from pretraining.model.fused import add_and_norm, add_then_norm, drop, embed, geglu, gelu, make_turns, rotate
from pretraining.processes.environment import prepare_process

ROWS, WIDTHS = st.integers(1, 40), st.one_of(st.integers(1, 80), st.sampled_from([128, 300]))
CPU = torch.device("cpu")
SCALES = st.sampled_from([0.01, 1.0, 5.0, 40.0])


@by_each
@settings(max_examples=12)
@given(rows=ROWS, width=WIDTHS, scale=SCALES, tanh=st.booleans())
def test_gelu(way: str, rows: int, width: int, scale: float, tanh: bool) -> None:
    x, bias = tensors(1, (rows, width), (width,))
    found = results(way, lambda x, bias: gelu(x * 1, bias, tanh), [x * scale, bias])
    wanted = exactly(lambda x, bias: F.gelu(x + bias, approximate="tanh" if tanh else "none"), [x * scale, bias])
    same(found, wanted)
    if way != "torch":  # whose own is 1e-6 off where x is near -3
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6 * max(scale, 1))


@by_each
@settings(max_examples=6)
@given(rows=ROWS, width=WIDTHS, scale=SCALES)
def test_geglu(way: str, rows: int, width: int, scale: float) -> None:
    x = tensors(4, (rows, 2 * width))[0] * scale
    same(results(way, geglu, [x]), exactly(lambda x: F.gelu(x[:, :width]) * x[:, width:], [x]))


def make_masked(way: str, probability: float, rows: int, width: int) -> tuple[Dropout, Tensor]:
    """Dropout by keys of rows, and its mask, which PyTorch draws by its generator."""
    dropout = Dropout(probability, keys_of(rows), site=7)
    torch.manual_seed(7)
    with compute_by(way) as device:
        return dropout, drop(torch.ones(rows, width, device=device), place(dropout, device)).cpu()


@by_each
@settings(max_examples=6)
@given(rows=ROWS, width=st.sampled_from([3, 31, 48, 80, 128, 300]), probability=st.sampled_from([0.0, 0.1, 0.7]))
def test_the_norm_of_a_sum(way: str, rows: int, width: int, probability: float) -> None:
    inputs = tensors(2, (rows, width), (width,), (rows, width), (width,), (width,))
    dropout, mask = make_masked(way, probability, rows, width)

    def ours(x: Tensor, *others: Tensor) -> Tensor:
        torch.manual_seed(7)
        return add_and_norm(x * 1, *others, 1e-6, place(dropout, x.device))  # type: ignore[call-arg, arg-type]

    def by_torch(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(residual + (x + bias) * mask, (width,), weight, shift, 1e-6)

    exact = exactly(by_torch, inputs)
    steepest = max(float(each.abs().max()) for each in exact)  # rows that nearly cancel have steep gradients
    same(results(way, ours, inputs), exact, 2e-6 * max(1.0, steepest if width == 3 else 1.0))


@by_each
@pytest.mark.parametrize(("biased", "probability"), [(False, 0.3), (True, 0.3), (True, 0.0)])
def test_two_norms_of_a_sum_that_goes_on(way: str, biased: bool, probability: float) -> None:
    """The sum has gradients of its own beside those through its norm; the last one has none."""
    x, weight, residual, other, bias, shift = tensors(5, (50, 64), (64,), (50, 64), (50, 64), (64,), (64,))
    inputs = [x, weight, residual, other, *([bias, shift] if biased else [])]
    dropout, mask = make_masked(way, probability, 50, 64)

    def twice(operation: Any, x: Tensor, weight: Tensor, residual: Tensor, other: Tensor, *pair: Tensor) -> Any:
        bias, shift = pair or (None, None)
        total, normed = operation(x * 1, bias, residual, weight, shift)
        return (normed, total, operation(normed.sin() * other, None, total, weight, shift)[1])

    def ours(x: Tensor, *others: Tensor) -> Any:
        torch.manual_seed(7)
        return add_then_norm(x, *others, 1e-5, place(dropout, x.device))  # type: ignore[call-arg, arg-type]

    def by_torch(x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None) -> Any:
        total = residual + (x if bias is None else x + bias) * mask
        return total, F.layer_norm(total, weight.shape, weight, shift, 1e-5)

    same(results(way, partial(twice, ours), inputs), exactly(partial(twice, by_torch), inputs), 1e-5)


def rotate_by_transformers(qkv: Tensor, positions: Tensor, base: float, heads: int) -> Tensor:
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    query, key, value = qkv.view(len(qkv), 3, heads, -1).transpose(0, 2)[None].unbind(2)  # (1, heads, n, size)
    size = query.shape[-1]
    angles = positions[:, None].float() * (1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float) / size)))
    whole = torch.cat([angles, angles], 1)[None]
    parts = [*apply_rotary_pos_emb(query, key, whole.cos(), whole.sin()), value]
    return torch.stack([each[0].transpose(0, 1) for each in parts], 1).reshape(qkv.shape)


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "size"), [(2, 64), (3, 20), (1, 2)])
def test_positions_rotate_queries_and_keys_as_in_transformers(
    way: str, heads: int, size: int, dtype: torch.dtype
) -> None:
    (qkv,) = tensors(6, (40, 3 * heads * size), dtype=dtype)
    positions = torch.tensor([*range(11), *range(20, 0, -1), 700, 8191])
    assert make_turns(160_000.0, size, 8192, CPU) is make_turns(160_000.0, size, 8192, torch.device("cpu"))

    def ours(qkv: Tensor) -> Tensor:
        turns = make_turns(160_000.0, size, 8192, qkv.device)
        found = rotate(qkv * 1, positions.to(qkv.device), turns, heads)
        assert torch.equal(found[33:], qkv[33:]), "rows behind the last piece"
        assert found.dtype == dtype
        assert torch.equal(found.view(40, 3, -1)[:, 2], qkv.view(40, 3, -1)[:, 2])
        return found

    def theirs(qkv: Tensor) -> Tensor:
        return torch.cat([rotate_by_transformers(qkv[:33], positions, 160_000.0, heads), qkv[33:]])

    close = 2**-7 if dtype == torch.bfloat16 else 1e-6  # also in fp64: transformers rounds queries to fp32
    for one, other in zip(results(way, ours, [qkv]), results("torch", theirs, [qkv]), strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_positions_rotate_in_fp64_with_fp64() -> None:
    """Finite differences would show a rounding to fp32."""
    (qkv,) = tensors(9, (4, 3 * 2 * 4), dtype=torch.float64)
    turns = make_turns(10.0, 4, 4, CPU)
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.arange(4), turns, 2), [qkv.requires_grad_()])


@by_ours
def test_in_16_bits_the_error_is_that_of_rounding(way: str) -> None:
    """On a GPU half a unit in the last place of what is written; on a CPU a whole one."""
    dropout, mask = make_masked(way, 0.2, 33, 96)

    def norm(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype != torch.float64:
            return add_then_norm(x * 1, bias, residual, weight, shift, 1e-5, place(dropout, x.device))
        total = residual + (x + bias) * mask
        return total, F.layer_norm(total, (96,), weight, shift, 1e-5)

    def turn(x: Tensor) -> Tensor:
        turns = make_turns(10_000.0, 16, 33, x.device)
        return rotate(x * 1, torch.arange(33, device=x.device), turns, 2)

    cases: list[tuple[int, Any, Any]] = [
        (2, lambda x, bias: gelu(x * 1, bias), lambda x, bias: F.gelu(x + bias)),
        (1, lambda x: gelu(x * 1, None, tanh=True), lambda x: F.gelu(x, approximate="tanh")),
        (1, geglu, lambda x: F.gelu(x[:, :48]) * x[:, 48:]),
        (5, norm, norm),
        (1, turn, lambda x: rotate_by_transformers(x, torch.arange(33), 10_000.0, 2)),
    ]
    for dtype in [torch.bfloat16, torch.float16][: 1 + (way == "triton")]:
        inputs = tensors(7, (33, 96), (96,), (33, 96), (96,), (96,), dtype=dtype)
        most = torch.finfo(dtype).eps / (2 if way == "triton" else 1)
        for count, ours, exact in cases:
            for one, other in zip(results(way, ours, inputs[:count]), exactly(exact, inputs[:count]), strict=True):
                assert float((one - other).norm() / other.norm()) < most


@by_each
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(way: str, poison: float) -> None:
    """A kernel that compares and clamps must not turn NaN into something harmless."""
    inputs = tensors(9, (4, 32), (32,), (4, 32), (32,), (32,))
    inputs[0][2, 5] = poison
    for dtype in (torch.float32, torch.bfloat16):
        given = [each.to(dtype) for each in inputs]
        found = results(way, lambda x, bias: gelu(x * 1, bias), given[:2])[0]
        assert found.isfinite().all(1).tolist() == [True, True, False, True]
        normed = results(way, lambda x, *others: add_and_norm(x * 1, *others, 1e-6, place(NONE, x.device)), given)[0]  # type: ignore[call-arg]
        assert normed.isfinite().any(1).tolist() == [True, True, False, True]


def test_sums_of_embedding_gradients_do_not_stand_still_in_bf16() -> None:
    """4,096 gradients of 1 are 4,096; added one by one in bfloat16 they are 256."""
    tables = [each.requires_grad_() for each in tensors(8, (10, 4), (4096, 4), (2, 4), dtype=torch.bfloat16)]
    zeros, positions = torch.zeros(4096, dtype=torch.int64), torch.arange(4096)
    embed(tables[0], zeros, (tables[1], positions), (tables[2], zeros)).sum().backward()
    for table in (tables[0], tables[2]):
        assert gradient(table)[0].tolist() == [4096] * 4
        assert not gradient(table)[1:].any()


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(probability: float) -> None:
    kept = drop(torch.ones(2000, 500), Dropout(probability, keys_of(2000), site=1))
    share = float((kept == 0).double().mean())
    assert share == pytest.approx(probability, abs=5 * math.sqrt(probability * (1 - probability) / kept.numel()))
    assert torch.unique(kept).tolist() == pytest.approx([0, 1 / (1 - probability)])


def test_masks_are_independent() -> None:
    """Of one another by row, column, site and draw: correlations as of a million fair draws."""

    def mask(draw: int, site: int) -> Tensor:
        return (drop(torch.ones(1000, 1000), Dropout(0.5, keys_of(1000, draw), site)) != 0).double() - 0.5

    base = mask(0, 1)
    for other in (mask(0, 2), mask(1, 1), mask(0, 5), base.roll(1, 0), base.roll(1, 1), base.roll(16, 1), base.T):
        assert abs(float((base * other).mean())) / 0.25 < 5 / 1000
    for direction in (0, 1):  # rows and columns are not more alike in number than chance allows
        assert float(base.mean(direction).std()) == pytest.approx(0.5 / math.sqrt(1000), rel=0.15)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=6), draw=st.integers(0, 2**64 - 1))
def test_row_keys_belong_to_the_example(lengths: list[int], draw: int) -> None:
    """Not to the place in the batch."""
    batch = random_batch(lengths, 50)
    alone = replace(random_batch(lengths[1:], 50), examples=batch.examples[1:])

    def keys(packed: Batch) -> Tensor:
        return make_row_keys(draw, packed.examples, packed.positions.numpy(), np.array(packed.lengths))

    assert torch.equal(keys(batch)[lengths[0] :], keys(alone))
    assert len(torch.unique(keys(batch))) == sum(lengths)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_thread_and_two_compute_the_same(dtype: torch.dtype) -> None:
    """Sums over rows are taken thread by thread, so only those may differ, by rounding."""
    inputs = tensors(10, (33, 64), (64,), (33, 64), (64,), (64,), dtype=dtype)

    def compute(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        norm: Callable[..., Any] = add_and_norm
        out = norm(x * 1, *others, 1e-6, Dropout(0.1, keys_of(33), 3))
        return out, geglu(torch.cat(add_then_norm(x * 1, *others, 1e-6, NONE), 1))  # type: ignore[call-arg, arg-type]

    both = []
    for count in (1, 2):
        with threads(count):
            both.append(results("kernels", compute, inputs))
    assert torch.equal(both[0][0], both[1][0])
    for one, other in zip(*both, strict=True):
        close = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def compute_gelu() -> tuple[bool, float]:
    """What a rank does: whether it has kernels, and the sum of a small result."""
    prepare_process()
    return kernels.usable(torch.zeros(1)), float(gelu(torch.ones(2, 2), torch.zeros(2)).sum())


def test_without_a_compiler_it_works_and_says_so(tmp_path: Path) -> None:
    (done,) = spawn(1, compute_gelu, environment={"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": ""})
    assert done.result == (False, pytest.approx(4 * 0.841345))
    assert done.errors == "warning: no C++ compiler: training on the CPU will be slow (install g++)\n"


def test_where_autocast_mixes_types_pytorch_computes() -> None:
    x, bias = torch.randn(3, 8).bfloat16(), torch.ones(8)
    with torch.autocast("cpu", torch.bfloat16):
        found = gelu(x.clone(), bias)
    torch.testing.assert_close(found.float(), F.gelu(x.float() + bias), rtol=0.02, atol=0.02)
