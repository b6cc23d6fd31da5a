"""The operations between matrix products: our fused kernels on a CPU, and on a GPU with Triton; elsewhere PyTorch's.

Their results are equal but for rounding and for the masks of dropout. Our kernels draw the same masks on CPU and GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from pretraining.mesh.mesh import ALONE, Mesh, sum_over_tensor_ranks
from pretraining.model import cpu_kernels as kernels
from pretraining.model import cpu_operations
from pretraining.model import gpu_operations as gpu
from pretraining.model.own_backward import Forward, ForwardOfTwo, Gradients, Losses, with_backward
from pretraining.model.products import pad_to_tiles
from pretraining.model.shared_loss import share_log_probabilities, share_loss

TAKES_ROWS = "takes_rows"
"""The attribute of a table whose gradient may be a sparse tensor of some rows."""
torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns where nobody has chosen
MOST_LOGITS = 1 << 22
"""The most logits that are in memory at once for log-probabilities."""
CACHED = 1 << 23
"""The most logits of a chunk on a CPU: four times as many do not fit its caches, and take a fifth longer."""


@dataclass(frozen=True)
class Dropout:
    """The probability and the random keys of dropout at one place of the model.

    In our kernels a hash of (row key, site, column) decides. A row key stands for (seed, example, position), so a mask
    depends neither on ranks and devices nor on the rest of the batch. Elsewhere PyTorch's generator decides, as it does
    for the probabilities of attention on a GPU.
    """

    probability: float
    keys: Tensor
    """(n,) int32, a key for each row; empty where PyTorch's generator decides. (sites, n) after `make_compilable`"""
    site: int = 0
    columns: Tensor | None = None
    """(width,) int32, a key for each column, where PyTorch's operations draw the masks: row keys include the site"""
    first_head: int = 0
    """the number among all heads of the first that this rank computes, for the probabilities of attention"""

    @property
    def drops(self) -> bool:
        """Whether our kernels drop anything: they compare 32 bits, so not for a smaller probability."""
        return int(self.probability * 2**32) > 0

    def select_site(self, site: int) -> Dropout:
        """Selects a place of the model, which has masks of its own. Keys that include the site are copied:
        torch.compile would recompile a layer for another view."""
        return replace(self, site=site, keys=self.keys if self.columns is None else self.keys[site].clone())

    def select_rows(self, rows: Tensor) -> Dropout:
        """Selects the keys of some rows."""
        return replace(self, keys=self.keys[..., rows]) if len(self.keys) else self

    def add_spare_rows(self, rows: int) -> Dropout:
        """Adds keys for `rows` more rows, which belong to no piece."""
        return replace(self, keys=F.pad(self.keys, (0, rows))) if len(self.keys) else self

    def make_compilable(self, sites: int, width: int) -> Dropout:
        """Prepares the masks of our kernels at `sites` places of the model for layers under torch.compile.

        Inductor's own masks repeat in torch 2.13. The site is part of the keys: as a number of its own it would make
        torch.compile recompile each layer.
        """
        if not (len(self.keys) and self.probability):
            return self
        steps = torch.arange(max(sites, width), dtype=torch.int32, device=self.keys.device)
        keys = _scramble(self.keys ^ _scramble(steps[:sites] + HASH_STEP)[:, None])
        return replace(self, keys=keys, columns=steps[:width] * HASH_STEP)

    @property
    def for_kernels(self) -> kernels.Masks:
        return self.keys, self.site + (self.first_head << 32), float(self.probability)


HASH_STEP = 0x9E3779B9 - 2**32


def _scramble(x: Tensor) -> Tensor:
    """Hashes int32 as kernels/numbers.h does."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout by PyTorch's operations."""
    if dropout.columns is None:
        return F.dropout(x, dropout.probability) if dropout.probability else x
    threshold = int(dropout.probability * 2**32)
    hashed = _scramble(dropout.columns + dropout.keys[:, None])
    drops = (hashed ^ -(2**31)) < threshold - 2**31  # the order of unsigned numbers
    return torch.where(drops, 0.0, x * (1 / (1 - threshold / 2**32)))


def make_row_keys(dropout_seed: int, examples: Array, positions: Array, lengths: Array) -> Tensor:
    """Makes a key for every piece, from the seed of the step, the example and the position."""
    pieces = hash_key(np.repeat(hash_key(dropout_seed, *examples.T), lengths), positions)
    return torch.from_numpy(pieces.astype(np.uint32).view(np.int32))


def _find_operations(name: gpu.Operation, x: Tensor, masks: kernels.Masks | None = None) -> ModuleType | None:
    """Finds the module whose kernels can compute an operation on this tensor; None where PyTorch computes it."""
    if kernels.usable(x):
        return cpu_operations
    return gpu if gpu.usable(name, x, masks) else None


def draws_by_keys(x: Tensor) -> bool:
    """Whether our kernels can draw the masks of such hidden states, the same on each rank that has their keys."""
    return _find_operations("drop", x) is not None


def widen(x: Tensor) -> Tensor:
    """Converts 16 bits to fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gelu(x: Tensor, bias: Tensor | None, tanh: bool = False) -> Tensor:
    """gelu(x + bias), with erf or its approximation by tanh. May overwrite x, which nobody else may read."""
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    ours = _find_operations("gelu_tanh" if tanh else "gelu", x)
    return ours.gelu(x, bias, tanh) if ours else F.gelu(x + bias, approximate="tanh" if tanh else "none")


def geglu(x: Tensor) -> Tensor:
    """The gelu, with erf, of the left half of each row times the right half: (n, 2 * inner) -> (n, inner)."""
    ours = _find_operations("geglu", x)
    if ours:
        return ours.geglu(x)
    left, right = x.chunk(2, 1)
    return F.gelu(left) * right


@functools.cache
def make_turns(base: float, size: int, length: int, device: torch.device) -> Tensor:
    """Makes the cosines and the sines of the angles of rotary positions for heads of this size, (length, size) fp32:
    position times base^(-2 d / size) for the d-th pair of numbers. Made once: callers share the tensor."""
    with torch.inference_mode(False), torch.no_grad():
        steps = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size))
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * steps
        return torch.cat([angles.cos(), angles.sin()], 1)


def rotate(qkv: Tensor, positions: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Rotates the queries and keys in qkv, (rows, 3 * heads * size), by the angles of their positions, (n,); values and
    rows behind n stay. The left half of a head's numbers is paired with the right half.

    `turns` is from `make_turns`. May overwrite qkv, which nobody else may read, and in the backward pass its gradient.
    """
    ours = _find_operations("rotate", qkv)
    if ours:
        return ours.rotate(qkv, positions, turns, heads)
    n = len(positions)
    cosines, sines = turns[positions][:, None, None].chunk(2, -1)
    parts = qkv[:n].view(n, 3, heads, -1)
    left, right = parts[:, :2].chunk(2, -1)
    turned = torch.cat([left * cosines - right * sines, right * cosines + left * sines], -1).to(qkv.dtype)
    return torch.cat([torch.cat([turned, parts[:, 2:]], 1).view(n, -1), qkv[n:]])


def add_and_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, dropout: Dropout
) -> Tensor:
    """The layer norm of residual + dropout(x + bias). May overwrite x, which nobody else may read."""
    ours = _find_operations("add_and_norm", x, dropout.for_kernels)
    if ours:
        return ours.add_and_norm(x, bias, residual, weight, shift, epsilon, dropout.for_kernels)
    return F.layer_norm(residual + _drop(x + bias, dropout), weight.shape, weight, shift, epsilon)


def add_then_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    epsilon: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    """residual + dropout(x + bias), and the layer norm of it. May overwrite x, which nobody else may read."""
    ours = _find_operations("add_then_norm", x, dropout.for_kernels)
    if ours:
        bias, shift = (x.new_zeros(x.shape[1]) if each is None else each for each in (bias, shift))
        return ours.add_then_norm(x, bias, residual, weight, shift, epsilon, dropout.for_kernels)
    total = residual + _drop(x if bias is None else x + bias, dropout)
    return total, F.layer_norm(total, weight.shape, weight, shift, epsilon)


def drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout."""
    if not dropout.probability:
        return x
    ours = _find_operations("drop", x, dropout.for_kernels)
    return ours.drop(x, dropout.for_kernels) if ours else _drop(x, dropout)


def embed(word: Tensor, pieces: Tensor, *small: tuple[Tensor, Tensor], mesh: Mesh = ALONE) -> Tensor:
    """Adds up the embeddings of pieces and of other things, whose tables have few rows: `small` has at most two tables,
    each with its ids. In a mesh, `word` has this rank's rows of the pieces."""
    on_cpu = word.device.type == "cpu"
    if on_cpu and mesh.tensor_ranks == 1:
        first, second = [*(table for table, _ in small), None, None][:2]
        return _embed(word, first, second, getattr(word, TAKES_ROWS, False), pieces, *(ids for _, ids in small))
    look_up = gpu.look_up_few if gpu.takes_products(word) else F.embedding
    total = F.embedding(pieces, word) if mesh.tensor_ranks == 1 else _look_up_shares(word, pieces, mesh)
    for table, ids in small:
        total = total + (_embed(table, None, None, False, ids) if on_cpu else look_up(ids, table))
    return total


def _look_up_shares(word: Tensor, pieces: Tensor, mesh: Mesh) -> Tensor:
    """Looks up rows that the ranks of a tensor group divide: each takes its own, zeros for the others, and these are
    added up."""
    places = pieces - mesh.tensor_rank * len(word)
    own = (places >= 0) & (places < len(word))
    return sum_over_tensor_ranks(embed(word, places * own) * own[:, None], mesh)


@with_backward
def _embed(word: Tensor, first: Tensor | None, second: Tensor | None, takes_rows: bool, *ids: Tensor) -> Forward:
    """Adds up gradients in fp32. PyTorch on a CPU adds them up in bf16, where large sums stop growing."""
    tables = [table for table in (first, second) if table is not None]
    out = word[ids[0]]
    for table, places in zip(tables, ids[1:], strict=True):
        out.add_(table[places])
    return out, ids, partial(_embed_backward, (len(word), *map(len, tables)), takes_rows)


def _embed_backward(sizes: tuple[int, ...], takes_rows: bool, grad: Tensor, *ids: Tensor) -> Gradients:
    rows = widen(grad)

    def sums(size: int, ids: Tensor) -> Tensor:
        return rows.new_zeros(size, rows.shape[1]).index_add_(0, ids, rows)

    found, where = ids[0].unique(return_inverse=True)
    rows_of_words, size = sums(len(found), where).to(grad.dtype), (sizes[0], grad.shape[1])
    if takes_rows:
        words = torch.sparse_coo_tensor(found[None], rows_of_words, size, check_invariants=False, is_coalesced=True)
    else:
        words = grad.new_zeros(size).index_copy_(0, found, rows_of_words)
    return words, *(sums(*each).to(grad.dtype) for each in zip(sizes[1:], ids[1:], strict=True))


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
        return losses.sum(), right.sum()
    logits = widen(F.linear(hidden, weight, bias)[:, :vocabulary])
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


def has_loss_kernel(hidden: Tensor) -> bool:
    """Whether our kernels can compute losses from these hidden states."""
    return _find_operations("cross_entropy", hidden) is not None


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
    return torch.cat([_log_probabilities(part, weight, bias, wanted, vocabulary, mesh) for part, wanted in parts])


def _log_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, mesh: Mesh
) -> Tensor:
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
    return (losses.sum(), correct.sum()), saved, partial(_masked_loss_backward, len(hidden))


def _masked_loss_backward(
    predictions: int, grad: Tensor, hidden: Tensor, weight: Tensor, difference: Tensor
) -> Gradients:
    product = (difference @ weight)[:predictions]
    grad_hidden = product * grad  # a scalar in fp32, which leaves the others in their type
    grad_weight = difference.t() @ (hidden * grad)
    return grad_hidden, grad_weight, difference.sum(0) * grad


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
        loss, right, slopes = share_loss(widen(hidden @ weight.t()) + widen(bias), labels, vocabulary, mesh)
        return loss, right, slopes.to(hidden.dtype)
    if has_loss_kernel(hidden):
        logits = hidden @ weight.t()
        losses, correct = cross_entropies(logits, bias, labels, vocabulary, slopes=True)
        return losses.sum(), correct.sum(), logits
    logits = widen(F.linear(hidden, weight, bias))
    logits[:, vocabulary:] = -torch.inf
    right = (logits.argmax(1) == labels).sum()
    whole, answers = logits.logsumexp(1, keepdim=True), labels[:, None]
    losses = whole - logits.gather(1, answers)
    slopes = logits.sub_(whole).exp_().scatter_add_(1, answers, -torch.ones_like(losses))
    return losses.sum(), right, slopes.to(hidden.dtype)


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
