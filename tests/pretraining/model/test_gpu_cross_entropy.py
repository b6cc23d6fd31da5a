"""The loss of predictions by our kernel for GPUs, against PyTorch in fp64 and against the kernel for CPUs.

Where there is a GPU, it runs there; elsewhere Triton's interpreter runs it in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import has_gpu
from torch import Tensor

from pretraining.model import cpu_kernels, losses
from pretraining.model import gpu_operations as gpu

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu] if has_gpu() else []
DEVICE = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Rows go through several chunks, and the interpreter rounds as GPUs do."""
    from support.triton_interpreter import rounding_as_gpus_do

    from pretraining.model import gpu_cross_entropy

    usual, gpu_cross_entropy.CHUNK = gpu_cross_entropy.CHUNK, 64
    with nullcontext() if has_gpu() else rounding_as_gpus_do():
        yield
    gpu_cross_entropy.CHUNK = usual


def inputs(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits without their bias, of more columns than the vocabulary has words, the bias, and labels."""
    generator, padded = torch.Generator().manual_seed(rows), -(-vocabulary // 64) * 64
    logits, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, padded), (padded,)))
    return 3 * logits, bias, torch.randint(0, vocabulary, (rows,), generator=generator)


def ours(
    logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, which answers are right, and what is left in the place of the logits."""
    place = logits.to(DEVICE).clone()
    losses, right = gpu.cross_entropies(place, bias.to(DEVICE), labels.to(DEVICE), vocabulary, slopes)
    return losses.cpu(), right.cpu(), place.cpu()


@settings(max_examples=10)
@given(rows=st.integers(0, 5), vocabulary=st.integers(2, 200))
def test_losses_and_slopes_are_those_of_pytorch(rows: int, vocabulary: int) -> None:
    logits, bias, labels = inputs(rows, vocabulary)
    exact = (logits + bias).double()[:, :vocabulary].requires_grad_()
    wanted = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    losses, right, left = ours(logits, bias, labels, vocabulary)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
    assert right.tolist() == (exact.argmax(1) == labels).int().tolist()
    torch.testing.assert_close(left[:, :vocabulary].double(), slopes, rtol=1e-5, atol=1e-6)
    assert not left[:, vocabulary:].any(), "nothing is learned by what pads the vocabulary"
    assert torch.equal(ours(logits, bias, labels, vocabulary, slopes=False)[2], logits)


def test_in_bf16_the_only_error_is_that_of_rounding() -> None:
    logits, bias, labels = inputs(9, 150, torch.bfloat16)
    exact = (logits.double() + bias.double())[:, :150].requires_grad_()
    wanted = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    losses, _, left = ours(logits, bias, labels, 150)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(left[:, :150].double(), slopes, rtol=2**-8, atol=1e-9)


def test_a_vocabulary_as_large_as_bert_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks as in training, of which the last is not full."""
    from pretraining.model import gpu_cross_entropy

    monkeypatch.setattr(gpu_cross_entropy, "CHUNK", 4096)
    logits, bias, labels = inputs(2, 30_522, torch.bfloat16)
    wanted = F.cross_entropy((logits.double() + bias.double())[:, :30_522], labels, reduction="none")
    losses, _, left = ours(logits, bias, labels, 30_522)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    assert not left[:, 30_522:].any()
    assert left[torch.arange(2), labels].tolist() == pytest.approx([-1.0, -1.0], abs=0.1)


@pytest.mark.parametrize("label", [-100, 100, 127])
def test_a_label_that_is_no_word_is_seen_in_the_loss(label: int) -> None:
    logits, bias, labels = inputs(3, 100)
    labels[1] = label
    losses, right, left = ours(logits, bias, labels, 100)
    assert losses.isnan().tolist() == [False, True, False]
    assert not right[1]
    assert left[[0, 2]].isfinite().all()


def test_of_equal_logits_the_first_is_the_answer_as_on_a_cpu() -> None:
    logits, bias = torch.zeros(4, 192), torch.zeros(192)
    logits[:, [5, 70, 130]] = 2.0  # in three chunks
    logits[1, 130] = 2.5
    labels = torch.tensor([5, 130, 70, 0])
    assert ours(logits, bias, labels, 150)[1].tolist() == [1, 1, 0, 0]
    if cpu_kernels.usable(logits):
        _, right = losses.cross_entropies(logits.clone(), bias, labels, 150, slopes=False)
        assert right.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(poison: float) -> None:
    logits, bias, labels = inputs(3, 100)
    logits[1, 70] = poison
    losses, _, left = ours(logits, bias, labels, 100)
    assert not losses[1].isfinite()
    assert not left[1].isfinite().all()
    assert losses[[0, 2]].isfinite().all()


def test_very_unlikely_answers_cost_what_they_do() -> None:
    logits = torch.full((2, 64), -1e4)
    logits[:, 3] = 1e4
    losses, _, left = ours(logits, torch.zeros(64), torch.tensor([3, 9]), 64)
    assert losses.tolist() == pytest.approx([0.0, 2e4])
    assert left[1, [3, 9]].tolist() == [1.0, -1.0]


@pytest.mark.skipif(has_gpu(), reason="tensors of the host stand for those on a GPU")
def test_the_loss_of_a_model_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, hits and gradients as by PyTorch's operations, in training and without."""
    generator, labels = torch.Generator().manual_seed(2), torch.tensor([3, 90, 7])
    shapes = (3, 16), (128, 16), (128,)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    monkeypatch.setattr(cpu_kernels, "usable", lambda _: False)
    found = []
    for by_ours in (False, True):
        monkeypatch.setattr(gpu, "usable", lambda *_, said=by_ours: said)
        loss, right = losses.masked_loss(*tensors, labels, 100)  # type: ignore[call-arg, arg-type]
        with torch.no_grad():
            alone, same = losses.masked_loss(*tensors, labels, 100)  # type: ignore[call-arg, arg-type]
            likely = losses.log_probabilities(*tensors, labels, 100)  # type: ignore[call-arg, arg-type]
        assert int(right) == int(same)
        found.append([loss.detach(), alone, likely, *torch.autograd.grad(loss * 0.37, tensors)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
