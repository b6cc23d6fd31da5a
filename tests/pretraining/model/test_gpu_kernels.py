"""Our kernels for GPUs against PyTorch in fp64 and against the kernels for CPUs, whose masks of dropout they draw.

Where there is a GPU, they run there; elsewhere Triton's interpreter runs them in Python.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import has_gpu, slow
from support.operations import keys_of
from torch import Tensor

from pretraining.model import cpu_kernels, fused
from pretraining.model import gpu_operations as gpu
from pretraining.model.dropout import Dropout, make_row_keys

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu] if has_gpu() else []
DEVICE = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
NONE = Dropout(0.0, torch.empty(0, dtype=torch.int32))
WIDTHS = st.sampled_from([3, 48, 80, 128, 300])


@pytest.fixture(autouse=True, scope="module")
def rounding() -> Iterator[None]:
    from support.triton_interpreter import rounding_as_gpus_do

    with nullcontext() if has_gpu() else rounding_as_gpus_do():
        yield


def masks(dropout: Dropout) -> cpu_kernels.Masks:
    """For the kernels on the device."""
    return dropout.keys.to(DEVICE), dropout.site, dropout.probability


def drawn(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def inputs_of_norm(rows: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn(2, (rows, width), (width,), (rows, width), (width,), (width,), dtype=dtype)


def with_gradients(operation: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The result of an operation and its gradients, by a slope that is drawn, on the host in fp64."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = operation(*leaves)
    (slope,) = drawn(9, out.shape)
    found = torch.autograd.grad(out, leaves, slope.to(out))
    return [each.detach().cpu().double() for each in (out, *found)]


def on_device(operation: Any, inputs: list[Tensor]) -> list[Tensor]:
    return with_gradients(operation, [each.to(DEVICE) for each in inputs])


def exactly(operation: Any, inputs: list[Tensor]) -> list[Tensor]:
    return with_gradients(operation, [each.double() for each in inputs])


def gelu_by_torch(x: Tensor, bias: Tensor, tanh: bool = False) -> Tensor:
    return F.gelu(x + bias, approximate="tanh" if tanh else "none")


class Norm:
    """add_and_norm with one dropout: by our kernels for GPUs, by those for CPUs, and by PyTorch with their mask."""

    def __init__(self, dropout: Dropout, epsilon: float = 1e-6):
        self.dropout, self.epsilon = dropout, epsilon

    def ours(self, *inputs: Tensor) -> Tensor:
        return gpu.add_and_norm(*inputs, self.epsilon, masks(self.dropout))  # type: ignore[call-arg, arg-type]

    def on_cpu(self, x: Tensor, *others: Tensor) -> Tensor:
        return fused.add_and_norm(x * 1, *others, self.epsilon, self.dropout)  # type: ignore[call-arg, arg-type]

    def by_torch(self, x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        mask = fused.drop(torch.ones(x.shape), self.dropout)
        return F.layer_norm(residual + (x + bias) * mask, weight.shape, weight, shift, self.epsilon)


def same(ours: list[Tensor], exact: list[Tensor], tolerance: float = 2e-6) -> None:
    """To some roundings of the largest number of each tensor."""
    for one, other in zip(ours, exact, strict=True):
        assert one.shape == other.shape
        largest = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)


@settings(max_examples=12)
@given(rows=st.integers(1, 40), width=WIDTHS, scale=st.sampled_from([0.01, 1.0, 5.0]), tanh=st.booleans())
def test_gelu(rows: int, width: int, scale: float, tanh: bool) -> None:
    x, bias = drawn(1, (rows, width), (width,))
    ours = on_device(lambda *given: gpu.gelu(*given, tanh), [x * scale, bias])  # type: ignore[call-arg]
    same(ours, exactly(lambda *given: gelu_by_torch(*given, tanh), [x * scale, bias]))  # type: ignore[call-arg]


@settings(max_examples=6)
@given(rows=st.integers(1, 40), width=WIDTHS)
def test_geglu(rows: int, width: int) -> None:
    (x,) = drawn(1, (rows, 2 * width))
    same(on_device(gpu.geglu, [x]), exactly(lambda x: F.gelu(x[:, :width]) * x[:, width:], [x]))


@settings(max_examples=6)
@given(rows=st.integers(1, 40), heads=st.integers(1, 5), size=st.sampled_from([2, 16, 80]))
def test_rotary_positions(rows: int, heads: int, size: int) -> None:
    """As by the kernels for CPUs, also rows behind the last piece."""
    (qkv,), turns = drawn(1, (rows + 3, 3 * heads * size)), fused.make_turns(100.0, size, 50, DEVICE)
    positions = torch.arange(rows, device=DEVICE).flip(0)
    found = on_device(lambda x: gpu.rotate(x * 1, positions, turns, heads), [qkv])
    same(found, with_gradients(lambda x: fused.rotate(x * 1, positions.cpu(), turns.cpu(), heads), [qkv]), 1e-6)


@pytest.mark.kernels
@settings(max_examples=5)
@given(rows=st.integers(1, 40), width=WIDTHS, probability=st.sampled_from([0.0, 0.3]))
def test_a_sum_and_its_norm(rows: int, width: int, probability: float) -> None:
    norm, inputs = Norm(Dropout(probability, keys_of(rows), site=7)), inputs_of_norm(rows, width)

    def on_gpu(*given: Tensor) -> Tensor:
        return torch.cat(gpu.add_then_norm(*given, norm.epsilon, masks(norm.dropout)))  # type: ignore[call-arg, arg-type]

    def by_torch(*given: Tensor) -> Tensor:
        x, bias, residual, *_ = given
        total = residual + (x + bias) * fused.drop(torch.ones(x.shape), norm.dropout)
        return torch.cat([total, norm.by_torch(*given)])

    exact = exactly(by_torch, inputs)
    steepest = max(float(each.abs().max()) for each in exact)
    same(on_device(on_gpu, inputs), exact, 2e-6 * max(1.0, steepest if width == 3 else 1.0))


@pytest.mark.kernels
@settings(max_examples=6)
@given(rows=st.integers(1, 40), width=WIDTHS, probability=st.sampled_from([0.0, 0.1, 0.7]))
def test_add_and_norm(rows: int, width: int, probability: float) -> None:
    norm, inputs = Norm(Dropout(probability, keys_of(rows), site=7)), inputs_of_norm(rows, width)
    exact = exactly(norm.by_torch, inputs)
    steepest = max(float(each.abs().max()) for each in exact)  # rows that nearly cancel have steep gradients
    same(on_device(norm.ours, inputs), exact, 2e-6 * max(1.0, steepest if width == 3 else 1.0))


@settings(max_examples=6)
@given(rows=st.integers(0, 70), heads=st.integers(1, 5), size=st.sampled_from([1, 16, 80]))
def test_gradients_are_laid_side_by_side_and_summed(rows: int, heads: int, size: int) -> None:
    parts = drawn(5, *[(rows, heads, size)] * 3)
    bias = torch.zeros(3 * heads * size, device=DEVICE)
    found, total = gpu.join(*(each.to(DEVICE) for each in parts), bias)  # type: ignore[call-arg]
    wanted = torch.cat([each.flatten(1) for each in parts], 1)
    assert torch.equal(found.cpu(), wanted)
    same([total.cpu().double()], [wanted.double().sum(0)])


@pytest.mark.kernels
@settings(max_examples=15)
@given(
    keys=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    site=st.integers(0, 300),
    width=WIDTHS,
    probability=st.one_of(st.sampled_from([1e-12, 0.1, 0.5]), st.floats(1e-6, 0.9999)),
)
def test_masks_are_those_of_a_cpu_bit_for_bit(keys: list[int], site: int, width: int, probability: float) -> None:
    """And go backward as they went forward."""
    dropout = Dropout(probability, torch.tensor(keys, dtype=torch.int32), site)
    ones = torch.ones(len(keys), width)
    x = ones.to(DEVICE).requires_grad_()
    found = gpu.drop(x, masks(dropout))
    wanted = fused.drop(ones, dropout)
    assert torch.equal(found.cpu(), wanted)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0].cpu(), wanted)


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), draw=st.integers(0, 2**64 - 1))
def test_keys_of_rows_are_those_of_a_cpu(lengths: list[int], draw: int) -> None:
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = np.concatenate([np.arange(length)[::-1] for length in lengths]).copy()
    examples = np.array([[number, 2**40 + number] for number in range(len(lengths))])
    on = (torch.from_numpy(positions).to(DEVICE), starts.to(DEVICE), max(lengths))
    found = gpu.make_row_keys(draw, examples, *on)
    assert torch.equal(found.cpu(), make_row_keys(draw, examples, positions, np.array(lengths)))


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_only_error_is_that_of_rounding(dtype: torch.dtype) -> None:
    """Of what is written: half a unit in the last place. The kernels for CPUs, which round in between, err no less."""
    norm, inputs = Norm(Dropout(0.2, keys_of(33), site=3)), inputs_of_norm(33, 300, dtype)
    for ours, by_torch, on_cpu, count in (
        (gpu.gelu, gelu_by_torch, lambda x, bias: fused.gelu(x * 1, bias), 2),
        (gpu.geglu, lambda x: F.gelu(x[:, :150]) * x[:, 150:], fused.geglu, 1),
        (norm.ours, norm.by_torch, norm.on_cpu, 5),
    ):
        exact = exactly(by_torch, inputs[:count])
        errors = error(on_device(ours, inputs[:count]), exact)
        assert max(errors) < torch.finfo(dtype).eps / 2
        if dtype == torch.bfloat16:
            theirs = error(with_gradients(on_cpu, inputs[:count]), exact)
            assert all(one < 1.05 * other for one, other in zip(errors, theirs, strict=True))


def test_no_rows_at_all() -> None:
    """A rank whose micro-batch predicts nothing of this kind: its gradients are zeros."""
    for probability in (0.0, 0.1):
        norm = Norm(Dropout(probability, NONE.keys))
        found = on_device(norm.ours, inputs_of_norm(0, 48))
        assert found[0].shape == (0, 48)
        assert not any(each.any() for each in found)
    _, grad_x, grad_bias = on_device(gpu.gelu, drawn(1, (0, 48), (48,)))
    assert grad_x.shape == (0, 48)
    assert grad_bias.tolist() == [0] * 48


def test_tensors_that_are_not_contiguous() -> None:
    norm, inputs = Norm(Dropout(0.3, keys_of(20))), inputs_of_norm(20, 48)
    turned = [each.t().contiguous().t() if each.dim() == 2 else each for each in inputs]
    same(on_device(norm.ours, turned), on_device(norm.ours, inputs), 0)
    same(on_device(gpu.gelu, turned[:2]), on_device(gpu.gelu, inputs[:2]), 0)
    x = inputs[0].to(DEVICE).requires_grad_()
    gpu.gelu(x, inputs[1].to(DEVICE)).sum().backward()  # its gradient is one number that is seen everywhere
    assert x.grad is not None
    assert x.grad.is_contiguous()


def test_sums_over_many_rows_do_not_stand_still_in_bf16() -> None:
    """Added one by one in bfloat16, thousands of ones are 256; and what blocks leave out would be missed."""
    rows = 9000
    bias = torch.full((16,), 30.0, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    gpu.gelu(torch.zeros(rows, 16, dtype=torch.bfloat16, device=DEVICE), bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == pytest.approx([rows] * 16, rel=2**-8)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(poison: float) -> None:
    inputs = inputs_of_norm(4, 48)
    inputs[0][2, 5] = poison
    gelu, norm = on_device(gpu.gelu, inputs[:2])[0], on_device(Norm(NONE).ours, inputs)[0]
    assert not gelu[2].isfinite().all()
    assert not norm[2].isfinite().any()
    assert gelu[[0, 1, 3]].isfinite().all()
    assert norm[[0, 1, 3]].isfinite().all()


OURS, SAME_BY_TORCH, ALL_BY_TORCH = 38, 35 + 33, 41 + 48
"""What a layer moves beside products and attention, forward and backward, in sizes of its hidden states: our kernels;
PyTorch for the same; PyTorch with the bias of queries, keys and values, their joint gradient and sums of gradients."""


@pytest.mark.skipif(has_gpu(), reason="the interpreter counts")
def test_kernels_move_few_bytes() -> None:
    """All that they read and write in a layer, sums of blocks and what norms keep among it: under half of what PyTorch
    moves in all, and 56% of what it moves for the same, since the backward pass must read and write whole tensors."""
    from support.triton_interpreter import Traffic

    rows, hidden = 128, 64
    norm, inputs = Norm(Dropout(0.1, keys_of(rows))), inputs_of_norm(rows, hidden, torch.bfloat16)
    with Traffic() as traffic:
        on_device(gpu.gelu, drawn(1, (rows, 4 * hidden), (4 * hidden,), dtype=torch.bfloat16))
        for _ in range(2):
            on_device(norm.ours, inputs)
    assert traffic.bytes < OURS * 2 * rows * hidden
    assert min(0.56 * SAME_BY_TORCH, 0.5 * ALL_BY_TORCH) > OURS
    assert traffic.again <= 4 * hidden, "of rows nothing is read again"
    parts = [each.to(DEVICE) for each in drawn(1, *[(rows, 2, hidden // 2)] * 3, dtype=torch.bfloat16)]
    with Traffic() as traffic:
        gpu.join(*parts, torch.zeros(3 * hidden, dtype=torch.bfloat16))  # type: ignore[call-arg]
    assert traffic.bytes < 6.5 * 2 * rows * hidden, "three read, three written, and sums of blocks"


def norm_of_sum(masks: cpu_kernels.Masks, *inputs: Tensor) -> Tensor:
    return gpu.add_then_norm(*inputs, 1e-6, masks)[1]  # type: ignore[call-arg, arg-type]


@pytest.mark.skipif(has_gpu(), reason="the interpreter counts")
def test_kernels_of_a_norm_before_the_block_move_each_tensor_once() -> None:
    """In sizes of hidden states, forward and backward: x, residual, sum and norm; then the sum and three gradients.
    Of a gate: halves and result; then these and two gradients. Of positions: queries and keys, in place."""
    from support.triton_interpreter import Traffic

    rows, hidden = 128, 64
    x, residual, qkv = drawn(1, (rows, hidden), (rows, hidden), (rows, 3 * hidden), dtype=torch.bfloat16)
    vectors = drawn(2, *[(hidden,)] * 3, dtype=torch.bfloat16)
    turns, positions = fused.make_turns(100.0, 32, rows, DEVICE), torch.arange(rows, device=DEVICE)
    operations: list[tuple[Any, list[Tensor], float]] = [
        (partial(norm_of_sum, masks(NONE)), [x, vectors[0], residual, *vectors[1:]], 4 + 4),
        (gpu.geglu, [qkv[:, : 2 * hidden]], 3 + 5),
        (lambda qkv: gpu.rotate(qkv * 1, positions, turns, 2), [qkv], 4 + 4),
    ]
    for operation, tensors, moved in operations:
        with Traffic() as traffic:
            on_device(operation, tensors)
        assert moved <= traffic.bytes / (2 * rows * hidden) < 1.3 * moved, "and what belongs to rows or columns"


@pytest.mark.parametrize(
    ("capability", "numbers"),
    [slow(75, "fp16"), slow(80, "fp32"), slow(80, "bf16"), slow(90, "bf16"), slow(100, "bf16")],
)
def test_kernels_compile_for_gpus(capability: int, numbers: str, tmp_path: Path) -> None:
    """To machine code, which needs no GPU; in a process of its own, that does not interpret them. Spills are bytes of a
    thread: on capability 100, GELU of base has 8 backward, which cost next to nothing."""
    paths = f"{ROOT}:{ROOT / 'tests'}"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "support.triton_compiler", str(capability), numbers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count = {"fp16": "64", "fp32": "65", "bf16": "89"}[numbers]  # in fp16 without the loss, in bf16 with attention
    assert done.stdout.split() == [count, "kernels,", "16" if capability == 100 else "0", "spills"]
