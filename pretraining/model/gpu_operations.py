"""The operations between matrix products on a GPU by our kernels, where Triton is installed and can compile them.

Triton is loaded when a GPU meets them first. Before a kernel's first use a row of zeros goes through it: where that
fails, a warning says so, and PyTorch's operations compute all that follows.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from data_prep.common.private_folders import keep_compiled
from pretraining.model.cpu_kernels import allowed

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_WIDTH = 1 << 14
"""The widest rows whose norm a program of the kernels computes at once."""
COST = "what lies between products moves nearly twice the bytes on this GPU, and each rank draws masks of its own"
USUAL_WORDS = 30_528
"""Logits of a prediction of BERT's, with those that pad its vocabulary."""
Operation = Literal["gelu", "add_and_norm", "drop", "join", "row_keys", "cross_entropy"]
Masks = tuple[Tensor, int, float]
"""Of dropout: the keys of rows, the site, and the probability."""

_failed = False


def usable(operation: Operation, x: Tensor, masks: Masks | None = None) -> bool:
    """Whether our kernels can do this with a tensor; never in what torch.compile translates, nor where something is to
    be dropped and rows have no keys."""
    if not (x.is_cuda and allowed()) or _failed or x.device.index != torch.cuda.current_device():
        return False
    drops = masks is not None and masks[2] > 0
    if drops and masks is not None and len(masks[0]) != x.shape[0]:
        return False
    if operation == "row_keys":
        return _works(operation, x.device, torch.float32, 1, False, False)
    if operation == "cross_entropy" and x.dtype == torch.float16:
        return False  # small shares would vanish, which gradients of a scaled loss do not
    fits = x.dtype in TYPES and x.dim() == 2 and x.shape[1] <= MOST_WIDTH
    return fits and _works(operation, x.device, x.dtype, x.shape[1], drops, torch.is_grad_enabled())


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias), with erf."""
    return _Gelu.apply(x, bias)


def add_and_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> Tensor:
    """The layer norm of residual + dropout(x + bias)."""
    return _AddAndNorm.apply(x, bias, residual, weight, shift, epsilon, masks)


def drop(x: Tensor, masks: Masks) -> Tensor:
    """Dropout by itself."""
    return _Drop.apply(x, masks)


def row_keys(dropout_seed: int, examples: Array, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
    """The keys of `fused.row_keys`, on the device of the positions: the host hashes sequences, the device pieces."""
    return _row_keys(hash_key(dropout_seed, *examples.T), positions, starts, longest)


def cross_entropies(
    logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool
) -> tuple[Tensor, Tensor]:
    """What `fused.cross_entropies` computes on a CPU."""
    from pretraining.model import gpu_cross_entropy

    return gpu_cross_entropy.cross_entropies(logits, bias, labels, vocabulary, slopes)


def join(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries, keys and values, (n, heads, size) each, as rows of one tensor, and that of their bias."""
    return _kernels().joined(*(each.contiguous() for each in (query, key, value)), bias)


def takes_products(x: Tensor) -> bool:
    """Whether products do what PyTorch has slower operations for: on a GPU they add in passing what lies in memory, and
    sum up many rows. Never in what torch.compile translates, which sees to it itself."""
    return x.is_cuda and allowed()


def look_up_few(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of a weight that has few of them, whose gradient is a product with zeros and ones: PyTorch's own adds up
    all that goes to a row one after another, thousands to each."""
    return _LookUpFew.apply(ids, weight)


class _LookUpFew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return weight[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        aligned = -(-ctx.rows // 8) * 8  # else cuBLAS takes slower kernels
        chosen = ids[:, None] == torch.arange(aligned, device=ids.device)
        return None, (chosen.to(grad.dtype).t() @ grad)[: ctx.rows]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        return _kernels().gelu_forward(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _kernels().gelu_backward(grad.contiguous(), *ctx.saved_tensors)


class _AddAndNorm(torch.autograd.Function):
    """Keeps its inputs and not their sum: the residual is kept anyway, by the product that it goes through."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        residual: Tensor,
        weight: Tensor,
        shift: Tensor,
        epsilon: float,
        masks: Masks,
    ) -> Tensor:
        x, residual, drops = x.contiguous(), residual.contiguous(), _kernels().Drops.of(*masks)
        out, means, scales = _kernels().norm_forward(x, bias, residual, weight, shift, epsilon, drops)
        ctx.save_for_backward(x, bias, residual, weight, means, scales)
        ctx.drops = drops
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _kernels().norm_backward(grad.contiguous(), *ctx.saved_tensors, ctx.drops)
        grad_x, grad_residual, grad_weight, grad_shift, grad_bias = slopes
        return grad_x, grad_bias, grad_residual, grad_weight, grad_shift, None, None


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: Masks) -> Tensor:
        ctx.drops = _kernels().Drops.of(*masks)
        return _kernels().dropped(x.contiguous(), ctx.drops)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _kernels().dropped(grad.contiguous(), ctx.drops), None


@functools.cache
def _kernels() -> Any:
    keep_compiled("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")
    from pretraining.model import gpu_kernels

    return gpu_kernels


def _row_keys(sequences: Array, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
    from pretraining.model import gpu_row_keys

    return gpu_row_keys.row_keys(sequences, positions, starts, longest)


@functools.cache
def _works(
    operation: Operation, device: torch.device, dtype: torch.dtype, width: int, drops: bool, learns: bool
) -> bool:
    """Whether all kernels that an operation needs compile for such rows and this GPU."""
    global _failed
    try:
        _try(operation, torch.zeros(1, width, dtype=dtype, device=device), drops, learns)
    except Exception as error:  # of Triton, a compiler that it calls, or the driver
        _failed = True
        missing = isinstance(error, ImportError)
        told = "Triton is not installed (pip install triton)" if missing else f"Triton fails ({_last_line(error)})"
        warnings.warn(f"{told}: {COST}", stacklevel=2)
    return not _failed


@torch.no_grad()
def _try(operation: Operation, row: Tensor, drops: bool, learns: bool) -> None:
    """Sends a row of zeros through the kernels of an operation, backward too where it `learns`; waits for nothing."""
    kernels, vector = _kernels(), row[0]
    numbers = torch.zeros(2, dtype=torch.int32, device=row.device)
    masks = kernels.Drops.of(numbers[:1], 0, 0.5 if drops else 0.0)
    if operation == "gelu":
        kernels.gelu_forward(row, vector)
        if learns:
            kernels.gelu_backward(row, row, vector)
    elif operation == "add_and_norm":
        _, means, scales = kernels.norm_forward(row, vector, row, vector, vector, 1.0, masks)
        if learns:
            kernels.norm_backward(row, row, vector, row, vector, means, scales, masks)
    elif operation == "drop":
        kernels.dropped(row, masks)
    elif operation == "cross_entropy":
        logits = row.new_zeros(1, USUAL_WORDS)
        cross_entropies(logits, logits[0].clone(), numbers[:1].long(), USUAL_WORDS - 6, learns)
    elif operation == "join":
        kernels.joined(row, row, row, vector.repeat(3))
    else:
        _row_keys(hash_key(0), numbers[:1].long(), numbers, 1)


def _last_line(error: Exception) -> str:
    lines = str(error).split("\n")
    return f"{type(error).__name__}: {next((line for line in reversed(lines) if line.strip()), '')[:200]}"
