"""The cross-entropy of predictions of which each rank of a tensor group has the logits of some pieces."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.mesh.mesh import Mesh


def locate_labels(logits: Tensor, labels: Tensor, vocabulary: int, first: int) -> tuple[Tensor, Tensor]:
    """Finds which labels are among this rank's pieces, which begin with piece `first`, (m,), and their columns, (m, 1).
    Sets the logits of the vocabulary's padding to minus infinity."""
    logits[:, max(0, vocabulary - first) :] = -torch.inf
    own = (labels >= first) & (labels < first + logits.shape[1])
    return own, ((labels - first) * own)[:, None]


def share_log_probabilities(logits: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh) -> Tensor:
    """Computes the log-probabilities of the labels, (m,), from this rank's logits, which it overwrites."""
    own, places = locate_labels(logits, labels, vocabulary, mesh.tensor_rank * logits.shape[1])
    largest = mesh.reduce(logits.max(1)[0], dist.ReduceOp.MAX)
    answers = torch.where(own, logits.gather(1, places)[:, 0], 0.0)
    sums, answers = mesh.reduce(torch.stack([logits.sub_(largest[:, None]).exp_().sum(1), answers])).unbind()
    return answers - largest - sums.log()


def share_loss(logits: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the losses, (m,), the number of right predictions, and the gradient of this rank's logits, (m, own rows
    of the decoder), which replaces them; it is zero in the padding of the vocabulary.

    The ranks tell one another four numbers a prediction: the largest logit; then the sum of exponentials, the answer's
    logit, and whether a logit as large as the largest comes before the answer.
    """
    first = mesh.tensor_rank * logits.shape[1]
    own, places = locate_labels(logits, labels, vocabulary, first)
    tops, at = logits.max(1)
    largest = mesh.reduce(tops.clone(), dist.ReduceOp.MAX)
    answers = torch.where(own, logits.gather(1, places)[:, 0], 0.0)
    earlier = (tops == largest) & (at + first < labels)
    shares = logits.sub_(largest[:, None]).exp_()
    sums, answers, earliest = mesh.reduce(torch.stack([shares.sum(1), answers, earlier.to(shares.dtype)])).unbind()
    slopes = shares.div_(sums[:, None]).scatter_add_(1, places, -own[:, None].to(shares.dtype))
    right = (answers == largest) & (earliest == 0)
    return sums.log() + largest - answers, right.sum(), slopes
