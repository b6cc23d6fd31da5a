"""The loss of predictions by PyTorch, our kernels for CPUs and those for GPUs, whole and in chunks, against fp64."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import KERNELS, TRITON, by_each, by_ours, compute_by, exactly, results
from torch import Tensor

from pretraining.model import losses
from pretraining.model.losses import cross_entropies, log_probabilities, loss_in_chunks, masked_loss


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Rows go through several chunks of the kernel for GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton"):
            patch.setattr("pretraining.model.gpu_cross_entropy.CHUNK", 64)
        yield


def inputs(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a decoder with rows that pad it and its bias, and labels."""
    generator, padded = torch.Generator().manual_seed(rows), -(-vocabulary // 64) * 64
    shapes = (rows, 16), (padded, 16), (padded,)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randint(0, vocabulary, (rows,), generator=generator)


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits without their bias, the bias, and labels."""
    (hidden, weight, bias), labels = inputs(rows, vocabulary, dtype)
    return (hidden @ weight.t()).detach(), bias.detach(), labels


@by_each
@settings(max_examples=10)
@given(rows=st.integers(1, 90), vocabulary=st.integers(2, 150), at_once=st.integers(1, 100))
def test_it_is_the_loss_of_whole_logits(way: str, rows: int, vocabulary: int, at_once: int) -> None:
    """All at once or in chunks, of which few are enough for the interpreter."""
    rows, at_once = (rows % 5 + 1, at_once % 3 + 2) if way == "triton" else (rows, at_once)
    tensors, labels = inputs(rows, vocabulary)

    def plainly(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias)[:, :vocabulary]
        return F.cross_entropy(logits, labels, reduction="sum")

    wanted = exactly(plainly, tensors)
    logits = F.linear(*tensors)[:, :vocabulary].detach()
    hits = (logits.argmax(1) == labels).sum()
    each = F.cross_entropy(logits.double(), labels, reduction="none").float()
    for operation, more in ((masked_loss, ()), (loss_in_chunks, (at_once,))):

        def ours(*given: Tensor, operation: Any = operation, more: tuple[int, ...] = more) -> Tensor:
            found: Tensor
            with losses.keep_losses() as kept:
                found, right = operation(*given, labels.to(given[0].device), vocabulary, *more)
            assert int(right) == int(hits)
            torch.testing.assert_close(torch.cat(kept).cpu(), each, rtol=1e-5, atol=2e-5)
            return found

        found = results(way, ours, tensors)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)


@by_each
def test_without_training_no_gradient_is_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the kernel nor by PyTorch's operations."""
    tensors, labels = inputs(9, 300)
    wanted = masked_loss(*tensors, labels, 300)[0].detach()  # type: ignore[call-arg, arg-type]
    calling = Mock(wraps=cross_entropies)
    monkeypatch.setattr(losses, "cross_entropies", calling)
    monkeypatch.setattr(losses, "_compute_slopes", pytest.fail)
    with torch.no_grad(), compute_by(way) as device:
        hidden, weight, bias, answers = (each.to(device) for each in (*tensors, labels))
        found = [
            masked_loss(hidden, weight, bias, answers, 300)[0],
            loss_in_chunks(hidden, weight, bias, answers, 300, 4)[0],
            -log_probabilities(hidden, weight, bias, answers, 300).sum(),
        ]
    for loss in found:
        torch.testing.assert_close(loss.cpu(), wanted)
    assert [call.kwargs["slopes"] for call in calling.call_args_list] == ([False] * 5 if way != "torch" else [])


@pytest.mark.parametrize("way", ["torch", KERNELS])
def test_gradients_of_weights_do_not_stand_still_in_bf16(way: str) -> None:
    """Of 1,024 chunks each gives a bias that is never the answer half a step: bf16 alone would stop at 128."""
    hidden, labels = torch.zeros(1024, 16, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.int64)
    weight, bias = (torch.zeros(size, dtype=torch.bfloat16) for size in ((64, 16), (64,)))
    hidden[:, 0] = 1
    with compute_by(way) as device:
        leaves = [each.to(device).requires_grad_() for each in (weight, bias)]
        loss, _ = loss_in_chunks(hidden.to(device), leaves[0], leaves[1], labels.to(device), 2, 1)
        of_weight, of_bias = torch.autograd.grad(loss, leaves)
    assert (of_bias[:2].tolist(), of_weight[:2, 0].tolist()) == ([-512, 512], [-512, 512])


def by_kernel(way: str, logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool = True) -> Any:
    """Losses, which answers are right, and what is left in the place of the logits."""
    with compute_by(way) as device:
        place = logits.to(device, copy=True)
        losses, right = cross_entropies(place, bias.to(device), labels.to(device), vocabulary, slopes)
    return losses.cpu(), right.cpu(), place.cpu()


@by_ours
@settings(max_examples=8)
@given(rows=st.integers(0, 5), vocabulary=st.integers(2, 200))
def test_losses_and_slopes_are_those_of_pytorch(way: str, rows: int, vocabulary: int) -> None:
    logits, bias, labels = logits_of(rows, vocabulary)
    exact = (logits + bias).double()[:, :vocabulary].requires_grad_()
    wanted = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    found, right, left = by_kernel(way, logits, bias, labels, vocabulary)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=2e-6, atol=2e-6)
    assert right.tolist() == (exact.argmax(1) == labels).int().tolist()
    torch.testing.assert_close(left[:, :vocabulary].double(), slopes, rtol=1e-5, atol=1e-6)
    assert not left[:, vocabulary:].any(), "nothing is learned by what pads the vocabulary"
    again = by_kernel(way, logits, bias, labels, vocabulary, slopes=False)
    assert all(map(torch.equal, again, (found, right, logits))), "nobody wants the gradient"


@by_ours
def test_in_bf16_the_only_error_is_that_of_rounding(way: str) -> None:
    logits, bias, labels = logits_of(9, 150, torch.bfloat16)
    exact = (logits.double() + bias.double())[:, :150].requires_grad_()
    wanted = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(wanted.sum(), exact)
    found, _, left = by_kernel(way, logits, bias, labels, 150)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(left[:, :150].double(), slopes, rtol=2**-8, atol=1e-9)


@pytest.mark.parametrize("way", [TRITON])
def test_a_vocabulary_as_large_as_bert_s(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks as in training, of which the last is not full."""
    monkeypatch.setattr("pretraining.model.gpu_cross_entropy.CHUNK", 4096)
    logits, bias, labels = logits_of(2, 30_522, torch.bfloat16)
    wanted = F.cross_entropy((logits.double() + bias.double())[:, :30_522], labels, reduction="none")
    found, _, left = by_kernel(way, logits, bias, labels, 30_522)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert not left[:, 30_522:].any()
    assert left[torch.arange(2), labels].tolist() == pytest.approx([-1.0, -1.0], abs=0.1)


@pytest.mark.parametrize("label", [-100, 100, 127])
@pytest.mark.parametrize("way", [TRITON])
def test_a_label_that_is_no_word_is_seen_in_the_loss(way: str, label: int) -> None:
    logits, bias, labels = logits_of(3, 100)
    labels[1] = label
    found, right, left = by_kernel(way, logits, bias, labels, 100)
    assert found.isnan().tolist() == [False, True, False]
    assert not right[1]
    assert left[[0, 2]].isfinite().all()


@by_ours
def test_of_equal_logits_the_first_is_the_answer(way: str) -> None:
    logits, bias = torch.zeros(4, 192), torch.zeros(192)
    logits[:, [5, 70, 130]] = 2.0  # in three chunks
    logits[1, 130] = 2.5
    assert by_kernel(way, logits, bias, torch.tensor([5, 130, 70, 0]), 150)[1].tolist() == [1, 1, 0, 0]


@by_ours
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_stays_visible(way: str, poison: float) -> None:
    logits, bias, labels = logits_of(3, 100)
    logits[1, 70] = poison
    found, _, left = by_kernel(way, logits, bias, labels, 100)
    assert not found[1].isfinite()
    assert not left[1].isfinite().all()
    assert found[[0, 2]].isfinite().all()


@by_ours
def test_very_unlikely_answers_cost_what_they_do(way: str) -> None:
    logits = torch.full((2, 64), -1e4)
    logits[:, 3] = 1e4
    found, _, left = by_kernel(way, logits, torch.zeros(64), torch.tensor([3, 9]), 64)
    assert found.tolist() == pytest.approx([0.0, 2e4])
    assert left[1, [3, 9]].tolist() == [1.0, -1.0]
