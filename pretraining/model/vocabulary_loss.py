"""The loss of many predictions, whose logits are never there together: they go through the vocabulary in chunks.

In training the forward pass makes the gradients too, chunk by chunk, so that no logits are kept or computed again.
Those of the decoder's weight and bias are added up over the chunks in fp32, and rounded to the type of the weights at
the end; before it is added, the product of a chunk for the weight is in that type. Without training there are losses
alone.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.fused import cross_entropies, loses_by_kernels, masked_loss
from pretraining.model.own_backward import ForwardOfLoss, Gradients, with_backward

CACHED = 1 << 23
"""Logits at once on a CPU: with four times as many, which its caches do not hold, the loss takes a fifth longer."""


def loss_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, at_once: int
) -> tuple[Tensor, Tensor]:
    """What `masked_loss` computes, from the logits of so many predictions at once at most."""
    if kernels.usable(hidden):
        at_once = min(at_once, max(64, CACHED // len(weight) // 64 * 64))
    if torch.is_grad_enabled():
        return _loss_in_chunks(hidden, weight, bias, labels, vocabulary, at_once)
    chunks = zip(hidden.split(at_once), labels.split(at_once), strict=True)
    found = [masked_loss(rows, weight, bias, answers, vocabulary) for rows, answers in chunks]
    losses, right = zip(*found, strict=True)
    return torch.stack(losses).sum(), torch.stack(right).sum()


def _with_slopes(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses of some predictions, how many are right, and the gradient of their logits, which takes the
    place of these; behind the vocabulary it is zero."""
    if loses_by_kernels(hidden):
        logits = hidden @ weight.t()
        losses, correct = cross_entropies(logits, bias, labels, vocabulary, slopes=True)
        return losses.sum(), correct.sum(), logits
    logits = F.linear(hidden, weight, bias).float()
    logits[:, vocabulary:] = -torch.inf
    right = (logits.argmax(1) == labels).sum()
    whole, answers = logits.logsumexp(1, keepdim=True), labels[:, None]
    losses = whole - logits.gather(1, answers)
    slopes = logits.sub_(whole).exp_().scatter_add_(1, answers, -torch.ones_like(losses))
    return losses.sum(), right, slopes.to(hidden.dtype)


@with_backward
def _loss_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, at_once: int
) -> ForwardOfLoss:
    total, right = torch.zeros((), device=hidden.device), torch.zeros((), dtype=torch.long, device=hidden.device)
    grad_hidden = torch.empty_like(hidden)
    grad_weight, grad_bias = (torch.zeros_like(each, dtype=torch.float32) for each in (weight, bias))
    for rows, answers, out in zip(*(each.split(at_once) for each in (hidden, labels, grad_hidden)), strict=True):
        loss, correct, slopes = _with_slopes(rows, weight, bias, answers, vocabulary)
        total, right = total + loss, right + correct
        torch.mm(slopes, weight, out=out)
        if weight.dtype == torch.float32:
            grad_weight.addmm_(slopes.t(), rows)
        else:
            grad_weight += slopes.t() @ rows
        grad_bias += slopes.sum(0, dtype=torch.float32)
        del slopes  # before the next logits are made
    return (total, right), (grad_hidden, grad_weight, grad_bias), partial(_scale_gradients, weight.dtype)


def _scale_gradients(dtype: torch.dtype, grad: Tensor, grad_hidden: Tensor, *of_weights: Tensor) -> Gradients:
    return grad_hidden * grad, *((each * grad).to(dtype) for each in of_weights)
