"""What our kernels for GPUs have beside the arithmetic of test_fused.py: the masks of a CPU, and machine code.

Where there is a GPU, they run there; elsewhere Triton's interpreter runs them in Python.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import slow
from support.operations import DEVICE, NONE, ON_DEVICE, keys_of, place, rounding, same, tensors, with_gradients
from torch import Tensor

from pretraining.model import fused
from pretraining.model import gpu_operations as gpu
from pretraining.model.dropout import Dropout, make_row_keys

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = ON_DEVICE


@pytest.fixture(autouse=True, scope="module")
def as_gpus_do() -> Iterator[None]:
    with rounding():
        yield


def on_device(operation: Any, inputs: list[Tensor]) -> list[Tensor]:
    return with_gradients(operation, [each.to(DEVICE) for each in inputs])


@settings(max_examples=4)
@given(rows=st.integers(0, 70), heads=st.integers(1, 5), size=st.sampled_from([1, 16, 80]))
def test_gradients_are_laid_side_by_side_and_summed(rows: int, heads: int, size: int) -> None:
    parts = tensors(5, *[(rows, heads, size)] * 3)
    bias = torch.zeros(3 * heads * size, device=DEVICE)
    found, total = gpu.join(*(each.to(DEVICE) for each in parts), bias)  # type: ignore[call-arg]
    wanted = torch.cat([each.flatten(1) for each in parts], 1)
    assert torch.equal(found.cpu(), wanted)
    same([total.cpu().double()], [wanted.double().sum(0)])


@pytest.mark.kernels
@settings(max_examples=10)
@given(
    keys=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    site=st.integers(0, 300),
    width=st.sampled_from([3, 48, 80, 128, 300]),
    probability=st.one_of(st.sampled_from([1e-12, 0.1, 0.5]), st.floats(1e-6, 0.9999)),
)
def test_masks_are_those_of_a_cpu_bit_for_bit(keys: list[int], site: int, width: int, probability: float) -> None:
    """And go backward as they went forward."""
    dropout = Dropout(probability, torch.tensor(keys, dtype=torch.int32), site)
    ones = torch.ones(len(keys), width)
    x = ones.to(DEVICE).requires_grad_()
    found = gpu.drop(x, place(dropout, DEVICE).for_kernels)
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


def norm(dropout: Dropout, *inputs: Tensor) -> Tensor:
    masks = place(dropout, DEVICE).for_kernels
    return gpu.add_and_norm(*inputs, 1e-6, masks)  # type: ignore[call-arg, arg-type]


def test_no_rows_at_all() -> None:
    """A rank whose micro-batch predicts nothing of this kind: its gradients are zeros."""
    inputs = tensors(2, (0, 48), (48,), (0, 48), (48,), (48,))
    for probability in (0.0, 0.1):
        found = on_device(lambda *given, p=probability: norm(Dropout(p, NONE.keys), *given), inputs)
        assert found[0].shape == (0, 48)
        assert not any(each.any() for each in found)
    _, grad_x, grad_bias = on_device(gpu.gelu, inputs[:2])
    assert grad_x.shape == (0, 48)
    assert grad_bias.tolist() == [0] * 48


def test_tensors_that_are_not_contiguous() -> None:
    dropout, inputs = Dropout(0.3, keys_of(20)), tensors(2, (20, 48), (48,), (20, 48), (48,), (48,))
    turned = [each.t().contiguous().t() if each.dim() == 2 else each for each in inputs]
    for count, operation in ((5, lambda *given: norm(dropout, *given)), (2, gpu.gelu)):
        same(on_device(operation, turned[:count]), on_device(operation, inputs[:count]), 0)
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


@pytest.mark.parametrize(
    ("capability", "numbers"),
    [slow(75, "fp16"), slow(80, "fp32"), slow(80, "bf16"), slow(90, "bf16"), slow(100, "bf16")],
)
def test_kernels_compile_for_gpus(capability: int, numbers: str, tmp_path: Path) -> None:
    """To machine code, which needs no GPU; in a process of its own, that does not interpret them. Spills are bytes of a
    thread: on capability 100, GELU of base has 8 backward, which cost next to nothing."""
    paths = f"{ROOT}:{ROOT / 'tests'}"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "support.triton_kernels", str(capability), numbers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count = {"fp16": "64", "fp32": "65", "bf16": "89"}[numbers]  # in fp16 without the loss, in bf16 with attention
    assert done.stdout.split() == [count, "kernels,", "16" if capability == 100 else "0", "spills"]
