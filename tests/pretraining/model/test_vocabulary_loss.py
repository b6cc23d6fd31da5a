"""The loss in chunks against the one of whole logits: values, gradients, and what is never made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import kernels_allowed
from support.live_tensors import LiveTensors
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model import fused
from pretraining.model.fused import cross_entropies, log_probabilities, loss_in_chunks, masked_loss


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with our kernels, once with PyTorch's operations."""
    with kernels_allowed(request.param == "kernels"):
        yield


def inputs(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a decoder with rows that pad it and its bias, and labels."""
    generator, padded = torch.Generator().manual_seed(rows), -(-vocabulary // 64) * 64
    shapes = (rows, 16), (padded, 16), (padded,)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randint(0, vocabulary, (rows,), generator=generator)


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


def test_logits_are_never_whole_and_backward_has_no_product() -> None:
    (hidden, weight, bias), labels = inputs(1000, 300)
    with LiveTensors() as forward:
        loss, _ = loss_in_chunks(hidden, weight, bias, labels, 300, 100)
    assert forward.largest <= 100 * 320
    assert forward.products == 3 * 10
    with LiveTensors() as backward:
        torch.autograd.backward(loss)
    assert backward.products == 0
    with torch.no_grad(), LiveTensors() as evaluation:
        loss_in_chunks(hidden, weight, bias, labels, 300, 100)
    assert evaluation.products == 10
    assert evaluation.largest <= 100 * 320


def test_without_training_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the kernel nor by PyTorch's operations."""
    (hidden, weight, bias), labels = inputs(200, 300)
    wanted = masked_loss(hidden, weight, bias, labels, 300)[0].detach()
    asked, call = list[int](), kernels.call

    def counted(name: str, *arguments: Any) -> None:
        asked.append(arguments[-1])
        call(name, *arguments)

    monkeypatch.setattr(kernels, "call", counted)
    monkeypatch.setattr(fused, "_with_slopes", pytest.fail)
    with torch.no_grad():
        found = [
            masked_loss(hidden, weight, bias, labels, 300)[0],
            loss_in_chunks(hidden, weight, bias, labels, 300, 64)[0],
            -log_probabilities(hidden, weight, bias, labels, 300).sum(),
        ]
    for loss in found:
        torch.testing.assert_close(loss, wanted)
    assert not any(asked)


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
