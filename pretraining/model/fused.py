"""The operations between matrix products: fused kernels of our own on a CPU, and on a GPU where Triton is; PyTorch's
elsewhere. They are equal but for rounding, and for the masks of dropout, of which ours are the same on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from pretraining.model import cpu_kernels as kernels
from pretraining.model import cpu_operations
from pretraining.model import gpu_operations as gpu
from pretraining.model.own_backward import Forward, ForwardOfLoss, Gradients, with_backward
from pretraining.model.products import rounded

TAKES_ROWS = "takes_rows"
"""The attribute of a table of which whoever adds up gradients can take some rows, as a sparse tensor; others are 0."""
torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns where nobody has chosen
MOST_LOGITS = 1 << 22
"""Logits that are in memory at once where log-probabilities alone are asked for."""


@dataclass(frozen=True)
class Dropout:
    """Where and how much is dropped.

    Our kernels drop what a hash of (row key, site, column) says. A row key stands for (seed, example, position): a mask
    depends neither on the ranks and their devices nor on what else is in the batch. Elsewhere PyTorch's generator
    decides, as it does for the probabilities of attention on a GPU.
    """

    probability: float
    keys: Tensor
    """(n,) int32, for each row; none where PyTorch's generator decides. Or (sites, n), by `for_compiled`"""
    site: int = 0
    columns: Tensor | None = None
    """(width,) int32, for each column; given where PyTorch makes the masks, and keys have the site in them"""

    def for_site(self, site: int) -> Dropout:
        """For another place of the model: other masks. Keys that have the site in them are copied, since torch.compile
        would translate a layer anew for views that lie elsewhere."""
        return replace(self, site=site, keys=self.keys if self.columns is None else self.keys[site].clone())

    def for_rows(self, rows: Tensor) -> Dropout:
        """For these rows alone."""
        return replace(self, keys=self.keys[..., rows]) if len(self.keys) else self

    def with_spare(self, rows: int) -> Dropout:
        """For so many more rows, that belong to no piece."""
        return replace(self, keys=F.pad(self.keys, (0, rows))) if len(self.keys) else self

    def for_compiled(self, sites: int, width: int) -> Dropout:
        """For layers that torch.compile translates: the masks of our kernels, at so many places of the model.

        Inductor's own masks repeat in torch 2.13. A site that lies in the keys is no number for which a layer would be
        translated anew.
        """
        if not (len(self.keys) and self.probability):
            return self
        steps = torch.arange(max(sites, width), dtype=torch.int32, device=self.keys.device)
        keys = _scrambled(self.keys ^ _scrambled(steps[:sites] + HASH_STEP)[:, None])
        return replace(self, keys=keys, columns=steps[:width] * HASH_STEP)

    @property
    def for_kernels(self) -> kernels.Masks:
        return self.keys, self.site, float(self.probability)


HASH_STEP = 0x9E3779B9 - 2**32


def _scrambled(x: Tensor) -> Tensor:
    """The hash of kernels/numbers.h, of int32."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout by PyTorch's operations."""
    if dropout.columns is None:
        return F.dropout(x, dropout.probability) if dropout.probability else x
    threshold = int(dropout.probability * 2**32)
    hashed = _scrambled(dropout.columns + dropout.keys[:, None])
    drops = (hashed ^ -(2**31)) < threshold - 2**31  # the order of unsigned numbers
    return torch.where(drops, 0.0, x * (1 / (1 - threshold / 2**32)))


def row_keys(dropout_seed: int, examples: Array, positions: Array, lengths: Array) -> Tensor:
    """Makes a key for every piece, from the seed of the step, the piece's example and its position."""
    pieces = hash_key(np.repeat(hash_key(dropout_seed, *examples.T), lengths), positions)
    return torch.from_numpy(pieces.astype(np.uint32).view(np.int32))


def _find_operations(name: gpu.Operation, x: Tensor, masks: kernels.Masks | None = None) -> ModuleType | None:
    """Finds the module with an operation of our own for this tensor; None where PyTorch's operations compute it."""
    if kernels.usable(x):
        return cpu_operations
    return gpu if gpu.usable(name, x, masks) else None


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), with erf. May overwrite x: it must be needed by nobody else."""
    ours = _find_operations("gelu", x)
    return ours.gelu(x, bias) if ours else F.gelu(x + bias)


def add_and_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, dropout: Dropout
) -> Tensor:
    """The layer norm of residual + dropout(x + bias). May overwrite x: it must be needed by nobody else."""
    ours = _find_operations("add_and_norm", x, dropout.for_kernels)
    if ours:
        return ours.add_and_norm(x, bias, residual, weight, shift, epsilon, dropout.for_kernels)
    return F.layer_norm(residual + _drop(x + bias, dropout), weight.shape, weight, shift, epsilon)


def drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout by itself."""
    if not dropout.probability:
        return x
    ours = _find_operations("drop", x, dropout.for_kernels)
    return ours.drop(x, dropout.for_kernels) if ours else _drop(x, dropout)


def embed(word: Tensor, position: Tensor, segment: Tensor, ids: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The sum of the rows that the ids of pieces, positions and segments name."""
    if word.device.type == "cpu":
        return _embed(word, position, segment, getattr(word, TAKES_ROWS, False), *ids)
    pieces, positions, segments = ids
    look_up = gpu.look_up_few if gpu.takes_products(word) else F.embedding
    return F.embedding(pieces, word) + look_up(positions, position) + look_up(segments, segment)


@with_backward
def _embed(word: Tensor, position: Tensor, segment: Tensor, takes_rows: bool, *ids: Tensor) -> Forward:
    """PyTorch's own backward pass adds up in bfloat16 on a CPU: a sum of thousands of rows stands still."""
    pieces, positions, segments = ids
    out = word[pieces].add_(position[positions]).add_(segment[segments])
    return out, ids, partial(_embed_backward, (len(word), len(position), len(segment)), takes_rows)


def _embed_backward(sizes: tuple[int, int, int], takes_rows: bool, grad: Tensor, *ids: Tensor) -> Gradients:
    rows = grad.float()

    def sums(size: int, ids: Tensor) -> Tensor:
        return rows.new_zeros(size, rows.shape[1]).index_add_(0, ids, rows)

    found, where = ids[0].unique(return_inverse=True)
    rows_of_words, size = sums(len(found), where).to(grad.dtype), (sizes[0], grad.shape[1])
    if takes_rows:
        words = torch.sparse_coo_tensor(found[None], rows_of_words, size, check_invariants=False, is_coalesced=True)
    else:
        words = grad.new_zeros(size).index_copy_(0, found, rows_of_words)
    return words, *(sums(*each).to(grad.dtype) for each in zip(sizes[1:], ids[1:], strict=True))


def masked_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of the predictions, and how many of them are right.

    `weight` and `bias` may have more rows than the vocabulary; they take no part.
    """
    if loses_by_kernels(hidden) and torch.is_grad_enabled():
        return _masked_loss(hidden, weight, bias, labels, vocabulary)
    if loses_by_kernels(hidden):
        losses, right = cross_entropies(hidden @ weight.t(), bias, labels, vocabulary, slopes=False)
        return losses.sum(), right.sum()
    logits = F.linear(hidden, weight, bias)[:, :vocabulary].float()
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


def loses_by_kernels(hidden: Tensor) -> bool:
    """Whether one of our kernels computes the losses of predictions from these hidden states."""
    return _find_operations("cross_entropy", hidden) is not None


def cross_entropies(
    logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool
) -> tuple[Tensor, Tensor]:
    """By our kernels: the cross-entropy of every row, and whether its answer is right. `slopes`: the gradient takes the
    place of the logits, which lack the bias; otherwise they stay."""
    ours = cpu_operations if kernels.usable(logits) else gpu
    return ours.cross_entropies(logits, bias, labels, vocabulary, slopes)


@torch.no_grad()
def log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """(m,) the log-probability of the label of every row, in fp32; the logits of some rows at a time are in memory."""
    rows = max(1, MOST_LOGITS // len(weight))
    parts = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([_log_probabilities(part, weight, bias, wanted, vocabulary) for part, wanted in parts])


def _log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    logits = F.linear(hidden, weight)
    if loses_by_kernels(hidden):
        return -cross_entropies(logits, bias, labels, vocabulary, slopes=False)[0]
    return -F.cross_entropy((logits + bias)[:, :vocabulary].float(), labels, reduction="none")


@with_backward
def _masked_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int) -> ForwardOfLoss:
    """The gradient takes the logits' place in the forward pass, so that nothing as large is kept twice."""
    whole = rounded(hidden)  # behind the predictions logits are zeros, and so is their gradient
    logits = whole @ weight.t()
    losses, correct = cross_entropies(logits[: len(hidden)], bias, labels, vocabulary, slopes=True)
    saved = (whole, weight, logits)  # the last are now their gradient
    return (losses.sum(), correct.sum()), saved, partial(_masked_loss_backward, len(hidden))


def _masked_loss_backward(
    predictions: int, grad: Tensor, hidden: Tensor, weight: Tensor, difference: Tensor
) -> Gradients:
    product = (difference @ weight)[:predictions]
    grad_hidden = product * grad  # a scalar in fp32, which leaves the others in their type
    grad_weight = difference.t() @ (hidden * grad)
    return grad_hidden, grad_weight, difference.sum(0) * grad
