"""The fused kernels and the loss in chunks against PyTorch's operations, and the masks of dropout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import NONE
from support.kernels import threads
from support.operations import either as either
from support.operations import gradients, keys_of, same, tensors
from support.pretraining_reference import gradient, random_batch
from support.processes import spawn
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model import fused as operations
from pretraining.model import losses
from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout, make_row_keys
from pretraining.model.fused import add_and_norm, add_then_norm, drop, embed, geglu, gelu
from pretraining.model.losses import cross_entropies, log_probabilities, loss_in_chunks, masked_loss
from pretraining.processes.environment import prepare_process

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 80))


@settings(max_examples=30, deadline=None)
@given(size=SIZES, scale=st.sampled_from([0.01, 1.0, 5.0, 40.0]), tanh=st.booleans())
def test_gelu(size: tuple[int, int], scale: float, tanh: bool) -> None:
    x, bias = tensors(1, size, size[1:])
    # in fp32, PyTorch's own is 1e-6 off where x is near -3
    wanted = F.gelu((x * scale + bias).double(), approximate="tanh" if tanh else "none").float()
    found = gelu(x * scale, bias, tanh)
    same([found, *gradients(found, [x, bias])], [wanted, *gradients(wanted, [x, bias])], 1e-4 * max(scale, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * max(scale, 1))


@settings(max_examples=20, deadline=None)
@given(size=SIZES)
def test_add_and_norm(size: tuple[int, int]) -> None:
    if size[1] < 3:
        return  # the norm of two numbers is their sign, and its gradient what rounding leaves of zero
    inputs = tensors(2, size, size[1:], size, size[1:], size[1:])
    x, bias, residual, weight, shift = inputs
    exact = [each.double() for each in inputs]  # PyTorch in fp32 is further off than ours where rows nearly cancel
    wanted = F.layer_norm(exact[2] + exact[0] + exact[1], weight.shape, exact[3], exact[4], 1e-6).float()
    expected = [wanted.detach(), *gradients(wanted, inputs)]
    found = add_and_norm(x * 1, bias, residual, weight, shift, 1e-6, NONE)
    scale = max(float(tensor.abs().max()) for tensor in expected)
    same([found, *gradients(found, inputs)], expected, 1e-5 * max(scale, 1))


@pytest.mark.kernels
def test_dropout_before_the_norm_is_dropout_of_the_same_mask() -> None:
    x, bias, residual, weight, shift = tensors(3, (50, 64), (64,), (50, 64), (64,), (64,))
    dropout = Dropout(0.3, keys_of(50), site=7)
    inputs = [x, bias, residual, weight, shift]
    mask = drop(torch.ones(50, 64), dropout)
    wanted = F.layer_norm(residual + (x + bias) * mask, (64,), weight, shift, 1e-12)
    expected = [wanted.detach(), *gradients(wanted, inputs)]
    found = add_and_norm(x * 1, bias, residual, weight, shift, 1e-12, dropout)
    same([found, *gradients(found, inputs)], expected, 1e-4)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 30), vocabulary=st.integers(2, 200))
def test_masked_loss(rows: int, vocabulary: int) -> None:
    padded = -(-vocabulary // 64) * 64
    inputs = tensors(7, (rows, 16), (padded, 16), (padded,))
    labels = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    logits = F.linear(*inputs)[:, :vocabulary]
    wanted = F.cross_entropy(logits, labels, reduction="sum")
    hidden, weight, bias = inputs
    found, right = masked_loss(hidden, weight, bias, labels, vocabulary)
    assert int(right) == int((logits.argmax(1) == labels).sum())
    same(
        [found, *torch.autograd.grad(found * 0.37, inputs)], [wanted, *torch.autograd.grad(wanted * 0.37, inputs)], 1e-4
    )


def test_sums_of_embedding_gradients_do_not_stand_still_in_bf16() -> None:
    """4,096 gradients of 1 are 4,096; added one by one in bfloat16 they are 256."""
    tables = tensors(8, (10, 4), (4096, 4), (2, 4), dtype=torch.bfloat16)
    zeros, positions = torch.zeros(4096, dtype=torch.int64), torch.arange(4096)
    embed(tables[0], zeros, (tables[1], positions), (tables[2], zeros)).sum().backward()
    for table in (tables[0], tables[2]):
        assert gradient(table)[0].tolist() == [4096] * 4
        assert not gradient(table)[1:].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(poison: float) -> None:
    """A kernel that compares and clamps must not turn NaN into something harmless."""
    x, bias = tensors(9, (4, 32), (32,))
    bad = x.detach().clone()
    bad[2, 5] = poison
    ones = torch.ones(32)
    assert not gelu(bad.clone(), bias)[2].isfinite().all()
    assert not add_and_norm(bad.clone(), bias, x, ones, ones, 1e-6, NONE)[2].isfinite().any()
    assert not masked_loss(bad, torch.randn(64, 32), torch.zeros(64), torch.zeros(4, dtype=torch.int64), 50)[
        0
    ].isfinite()
    assert bad.bfloat16()[2].isfinite().sum() == gelu(bad.bfloat16(), bias.bfloat16())[2].isfinite().sum()


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(probability: float) -> None:
    kept = drop(torch.ones(2000, 500), Dropout(probability, keys_of(2000), site=1))
    share = float((kept == 0).double().mean())
    assert share == pytest.approx(probability, abs=5 * math.sqrt(probability * (1 - probability) / kept.numel()))
    assert torch.unique(kept).tolist() == pytest.approx([0, 1 / (1 - probability)])


def test_masks_are_independent() -> None:
    """Of one another by row, column, site and draw: correlations as of a million fair draws."""

    def mask(draw: int, site: int) -> torch.Tensor:
        return (drop(torch.ones(1000, 1000), Dropout(0.5, keys_of(1000, draw), site)) != 0).double() - 0.5

    base = mask(0, 1)
    others = [mask(0, 2), mask(1, 1), mask(0, 5), base.roll(1, 0), base.roll(1, 1), base.roll(16, 1), base.T]
    for other in others:
        assert abs(float((base * other).mean())) / 0.25 < 5 / 1000
    for direction in (0, 1):  # rows and columns are not more alike in number than chance allows
        spread = float(base.mean(direction).std())
        assert spread == pytest.approx(0.5 / math.sqrt(1000), rel=0.15)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=6), draw=st.integers(0, 2**64 - 1))
def test_row_keys_belong_to_the_example(lengths: list[int], draw: int) -> None:
    """Not to the place in the batch."""
    batch = random_batch(lengths, 50)
    alone = replace(random_batch(lengths[1:], 50), examples=batch.examples[1:])

    def keys(packed: Batch) -> torch.Tensor:
        return make_row_keys(draw, packed.examples, packed.positions.numpy(), np.array(packed.lengths))

    assert torch.equal(keys(batch)[lengths[0] :], keys(alone))
    assert len(torch.unique(keys(batch))) == sum(lengths)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_thread_and_two_compute_the_same(dtype: torch.dtype) -> None:
    """Sums over rows are taken thread by thread, so only those may differ, by rounding."""
    results = []
    for count in (1, 2):
        with threads(count):
            inputs = tensors(10, (33, 64), (64,), (33, 64), (64,), (64,), dtype=dtype)
            x, bias, residual, weight, shift = inputs
            out = add_and_norm(x * 1, bias, residual, weight, shift, 1e-6, Dropout(0.1, keys_of(33), 3))
            gate = geglu(torch.cat(add_then_norm(x * 1, bias, residual, weight, shift, 1e-6, NONE), 1))
            results.append([out, gate, *gradients(out, inputs), *gradients(gate, inputs)])
    assert all(torch.equal(*pair) for pair in zip(results[0][:2], results[1][:2], strict=True))
    same(results[0], results[1], 1e-5 if dtype == torch.float32 else 0.05)


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
        found = operations.gelu(x.clone(), bias)
    torch.testing.assert_close(found.float(), torch.nn.functional.gelu(x.float() + bias), rtol=0.02, atol=0.02)


def inputs(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a decoder with rows that pad it and its bias, and labels."""
    generator, padded = torch.Generator().manual_seed(rows), -(-vocabulary // 64) * 64
    shapes = (rows, 16), (padded, 16), (padded,)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randint(0, vocabulary, (rows,), generator=generator)


@pytest.mark.usefixtures("either")
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 90), vocabulary=st.integers(2, 150), at_once=st.integers(1, 100))
def test_it_is_the_loss_of_whole_logits(rows: int, vocabulary: int, at_once: int) -> None:
    tensors, labels = inputs(rows, vocabulary)
    hidden, weight, bias = tensors
    logits = F.linear(hidden, weight, bias)[:, :vocabulary]
    wanted = F.cross_entropy(logits, labels, reduction="sum")
    found, right = loss_in_chunks(hidden, weight, bias, labels, vocabulary, at_once)
    assert int(right) == int((logits.argmax(1) == labels).sum())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(loss * 0.37, tensors) for loss in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    with torch.no_grad():
        alone, same = loss_in_chunks(hidden, weight, bias, labels, vocabulary, at_once)
    assert int(same) == int(right)
    torch.testing.assert_close(alone, found.detach())


@pytest.mark.usefixtures("either")
def test_without_training_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the kernel nor by PyTorch's operations."""
    (hidden, weight, bias), labels = inputs(200, 300)
    wanted = masked_loss(hidden, weight, bias, labels, 300)[0].detach()
    calling = Mock(wraps=kernels.call)
    monkeypatch.setattr(kernels, "call", calling)
    monkeypatch.setattr(losses, "_compute_slopes", pytest.fail)
    with torch.no_grad():
        found = [
            masked_loss(hidden, weight, bias, labels, 300)[0],
            loss_in_chunks(hidden, weight, bias, labels, 300, 64)[0],
            -log_probabilities(hidden, weight, bias, labels, 300).sum(),
        ]
    for loss in found:
        torch.testing.assert_close(loss, wanted)
    assert not any(call.args[-1] for call in calling.call_args_list)


def test_the_kernel_leaves_logits_whose_gradient_nobody_wants() -> None:
    logits, labels = torch.randn(5, 64), torch.arange(5)
    if not kernels.usable(logits):
        return
    before, bias = logits.clone(), torch.randn(64)
    losses, right = cross_entropies(logits, bias, labels, 50, slopes=False)
    assert torch.equal(logits, before)
    same, again = cross_entropies(logits, bias, labels, 50, slopes=True)
    assert torch.equal(losses, same)
    assert torch.equal(right, again)
    torch.testing.assert_close(logits.sum(1), torch.zeros(5), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("either")
def test_gradients_of_weights_do_not_stand_still_in_bf16() -> None:
    """Of 1,024 chunks each gives a bias that is never the answer half a step: bf16 alone would stop at 128."""
    hidden, labels = torch.zeros(1024, 16, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.int64)
    weight, bias = (torch.zeros(size, dtype=torch.bfloat16, requires_grad=True) for size in ((64, 16), (64,)))
    hidden[:, 0] = 1
    loss, _ = loss_in_chunks(hidden, weight, bias, labels, 2, 1)
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert bias.grad is not None
    assert (bias.grad[:2].tolist(), weight.grad[:2, 0].tolist()) == ([-512, 512], [-512, 512])
