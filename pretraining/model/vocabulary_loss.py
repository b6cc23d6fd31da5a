"""The loss of many predictions, computed in chunks, so that the logits of all of them are never in memory together.

In training, the forward pass of a chunk computes its gradients too: no logits are kept or computed again. The gradients
of the decoder's weight and bias are added up over the chunks in fp32, and rounded to the type of the weights at the
end; the product of a chunk for the weight has that type before it is added. Without training, no gradient is computed.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model import cpu_kernels as kernels
from pretraining.model.fused import cross_entropies, has_loss_kernel, masked_loss
from pretraining.model.own_backward import ForwardOfLoss, Gradients, with_backward

CACHED = 1 << 23
"""The most logits of a chunk on a CPU: four times as many do not fit its caches, and take a fifth longer."""


def loss_in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, at_once: int
) -> tuple[Tensor, Tensor]:
    """Computes the same as `masked_loss`, from the logits of at most `at_once` predictions at a time."""
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
    """Computes the sum of the losses of some predictions, the number of right ones, and the gradient of their logits,
    which replaces the logits; it is zero in the padding of the vocabulary."""
    if has_loss_kernel(hidden):
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
