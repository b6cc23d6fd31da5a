"""The cross-entropy of predicted pieces and its gradient: by our kernels, in chunks, on ranks that share a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.mesh.mesh import ALONE, Mesh
from pretraining.model import cpu_kernels as kernels
from pretraining.model import cpu_operations
from pretraining.model import gpu_operations as gpu
from pretraining.model.fused import find_operations, widen
from pretraining.model.own_backward import ForwardOfTwo, Gradients, Losses, with_backward
from pretraining.model.products import pad_to_tiles
from pretraining.model.shared_loss import share_log_probabilities, share_loss

MOST_LOGITS = 1 << 22
"""The most logits that are in memory at once for log-probabilities."""


CACHED = 1 << 23
"""The most logits of a chunk on a CPU: four times as many do not fit its caches, and take a fifth longer."""
_kept: list[list[Tensor]] = []
"""The lists of the contexts of `keep_losses`; the last gets what is predicted."""


@contextmanager
def keep_losses(wanted: bool = True) -> Iterator[list[Tensor]]:
    """Lists the cross-entropies of the predictions in its context, in their order and without gradients, if they are
    `wanted`; a context around it does not get them."""
    own = list[Tensor]()
    _kept.extend([own] * wanted)
    try:
        yield own
    finally:
        del _kept[len(_kept) - wanted :]


def _sum_losses(losses: Tensor) -> Tensor:
    """Sums up cross-entropies of predictions; keeps them where `keep_losses` asks for it."""
    if _kept:
        _kept[-1].append(losses.detach().flatten())
    return losses.sum()


def masked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh = ALONE
) -> Losses:
    """Computes the sum of the cross-entropies of the predictions, and the number of right ones.

    `weight` and `bias` may have more rows than the vocabulary, which are ignored. In a mesh they are this rank's rows.
    """
    if mesh.tensor_ranks > 1:
        return loss_in_chunks(hidden, weight, bias, labels, vocabulary, max(len(hidden), 1), mesh)
    if has_loss_kernel(hidden) and torch.is_grad_enabled():
        return _masked_loss(hidden, weight, bias, labels, vocabulary)
    if has_loss_kernel(hidden):
        losses, right = cross_entropies(hidden @ weight.t(), bias, labels, vocabulary, slopes=False)
        return _sum_losses(losses), right.sum()
    logits = widen(F.linear(hidden, weight, bias)[:, :vocabulary])
    if _kept:
        _sum_losses(F.cross_entropy(logits.detach(), labels, reduction="none"))
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


def has_loss_kernel(hidden: Tensor) -> bool:
    """Whether our kernels can compute losses from these hidden states."""
    return find_operations("cross_entropy", hidden) is not None


def cross_entropies(logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool) -> Losses:
    """Calls the kernel for `cpu_operations.cross_entropies`, or that of a GPU."""
    ours = cpu_operations if kernels.usable(logits) else gpu
    return ours.cross_entropies(logits, bias, labels, vocabulary, slopes)


@torch.no_grad()
def log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh = ALONE
) -> Tensor:
    """Computes the log-probability of the label of every row, (m,) in fp32, with the logits of some rows at a time;
    ranks of a mesh have a part of the decoder each."""
    rows = max(1, MOST_LOGITS // len(weight))
    parts = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([_score_labels(part, weight, bias, wanted, vocabulary, mesh) for part, wanted in parts])


def _score_labels(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh) -> Tensor:
    logits = F.linear(hidden, weight)
    if mesh.tensor_ranks > 1:
        return share_log_probabilities((logits + bias).float(), labels, vocabulary, mesh)
    if has_loss_kernel(hidden):
        return -cross_entropies(logits, bias, labels, vocabulary, slopes=False)[0]
    return -F.cross_entropy((logits + bias)[:, :vocabulary].float(), labels, reduction="none")


@with_backward
def _masked_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int) -> ForwardOfTwo:
    """Overwrites the logits by their gradient in the forward pass, so that only one tensor of their size is saved."""
    whole = pad_to_tiles(hidden)  # logits of the rows that are added are zeros, and so is their gradient
    logits = whole @ weight.t()
    losses, correct = cross_entropies(logits[: len(hidden)], bias, labels, vocabulary, slopes=True)
    saved = (whole, weight, logits)  # the last are now their gradient
    return (_sum_losses(losses), correct.sum()), saved, partial(_masked_loss_backward, len(hidden))


def _masked_loss_backward(
    predictions: int, grad: Tensor, hidden: Tensor, weight: Tensor, difference: Tensor
) -> Gradients:
    grad_hidden = (difference @ weight)[:predictions] * grad  # a scalar in fp32, which leaves the others in their type
    return grad_hidden, difference.t() @ (hidden * grad), difference.sum(0) * grad


def loss_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, at_once: int, mesh: Mesh = ALONE
) -> Losses:
    """Computes the same as `masked_loss`, so that the logits of only `at_once` predictions are in memory together.

    In training, the forward pass of a chunk computes its gradients too: no logits are kept or computed again. The
    gradients of the decoder's weight and bias are added up over the chunks in fp32, and rounded to the type of the
    weights at the end; what a chunk gives has that type before it is added.
    """
    if kernels.usable(hidden):
        at_once = min(at_once, max(64, CACHED // len(weight) // 64 * 64))
    if torch.is_grad_enabled() or mesh.tensor_ranks > 1:
        return _loss_in_chunks(hidden, weight, bias, labels, vocabulary, at_once, mesh)
    chunks = zip(hidden.split(at_once), labels.split(at_once), strict=True)
    found = [masked_loss(rows, weight, bias, answers, vocabulary) for rows, answers in chunks]
    losses, right = zip(*found, strict=True)
    return torch.stack(losses).sum(), torch.stack(right).sum()


def _compute_slopes(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the sum of the losses of some predictions, the number of right ones, and the gradient of their logits,
    which replaces the logits; it is zero in the padding of the vocabulary."""
    if mesh.tensor_ranks > 1:
        losses, right, slopes = share_loss(widen(hidden @ weight.t()) + widen(bias), labels, vocabulary, mesh)
        return _sum_losses(losses), right, slopes.to(hidden.dtype)
    if has_loss_kernel(hidden):
        logits = hidden @ weight.t()
        losses, correct = cross_entropies(logits, bias, labels, vocabulary, slopes=True)
        return _sum_losses(losses), correct.sum(), logits
    logits = widen(F.linear(hidden, weight, bias))
    logits[:, vocabulary:] = -torch.inf
    right = (logits.argmax(1) == labels).sum()
    whole, answers = logits.logsumexp(1, keepdim=True), labels[:, None]
    losses = whole - logits.gather(1, answers)
    slopes = logits.sub_(whole).exp_().scatter_add_(1, answers, -torch.ones_like(losses))
    return _sum_losses(losses), right, slopes.to(hidden.dtype)


@with_backward
def _loss_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, at_once: int, mesh: Mesh
) -> ForwardOfTwo:
    total, right = torch.zeros((), device=hidden.device), torch.zeros((), dtype=torch.long, device=hidden.device)
    wide = torch.promote_types(weight.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_weight, grad_bias = (torch.zeros_like(each, dtype=wide) for each in (weight, bias))
    for rows, answers, out in zip(*(each.split(at_once) for each in (hidden, labels, grad_hidden)), strict=True):
        loss, correct, slopes = _compute_slopes(rows, weight, bias, answers, vocabulary, mesh)
        total, right = total + loss, right + correct
        torch.mm(slopes, weight, out=out)
        if weight.dtype == wide:
            grad_weight.addmm_(slopes.t(), rows)
        elif kernels.usable(slopes):
            kernels.call("add_gradient", slopes.t() @ rows, grad_weight, grad_weight.numel(), 1)
        else:
            grad_weight += slopes.t() @ rows
        grad_bias += slopes.sum(0)  # added up in fp32; with `dtype` PyTorch would first make a copy
        del slopes  # before the next logits are made
    return (total, right), (grad_hidden, grad_weight, grad_bias), partial(_scale_gradients, weight.dtype)


def _scale_gradients(dtype: torch.dtype, grad: Tensor, grad_hidden: Tensor, *of_weights: Tensor) -> Gradients:
    return grad_hidden * grad, *((each * grad).to(dtype) for each in of_weights)
