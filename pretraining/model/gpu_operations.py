"""The operations between matrix products on a GPU by our kernels, where Triton is installed and can compile them.

Triton is loaded at the first use on a GPU. Before the first use of a kernel, a row of zeros is sent through it. If that
fails, a warning says so, and from then on PyTorch's operations are used.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from data_prep.common.private_folders import keep_compiled
from pretraining.model.cpu_kernels import Masks, may_use_kernels
from pretraining.model.gpu_tiles import Chunks
from pretraining.model.own_backward import Forward, ForwardOfTwo, Gradients, Losses, with_backward

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_WIDTH = 1 << 14
"""The widest rows whose norm a program can compute."""
COST = "what lies between products moves nearly twice the bytes on this GPU, and each rank draws masks of its own"
USUAL_WORDS = 30_528
"""The logits of a prediction of BERT, with those that pad its vocabulary."""
Operation = Literal[
    "gelu",
    "gelu_tanh",
    "geglu",
    "add_and_norm",
    "add_then_norm",
    "drop",
    "rotate",
    "join",
    "attention",
    "row_keys",
    "cross_entropy",
    "optimizer",
]

Form = tuple[int, int, int, int]
"""What chooses among the kernels of attention: the number of heads, the most pieces of a sequence, the number of the
first sequences in which a piece sees one way, and the window."""
ONE_PIECE: Form = (1, 1, 0, 1)
_failed = False


def usable(operation: Operation, x: Tensor, masks: Masks | None = None, form: Form = ONE_PIECE) -> bool:
    """Whether our kernels can compute this operation on a tensor; never for dropout without keys of rows. `form` is
    that of attention."""
    if not (x.is_cuda and may_use_kernels()) or _failed or x.device.index != torch.accelerator.current_device_index():
        return False
    drops = masks is not None and masks[2] > 0
    if drops and masks is not None and len(masks[0]) != x.shape[0]:
        return False
    if operation in ("row_keys", "optimizer"):
        return _works(operation, x.device, torch.float32, 1, False, False)
    if operation == "cross_entropy" and x.dtype == torch.float16:
        return False  # small shares would vanish, which gradients of a scaled loss do not
    fits = x.dtype in TYPES and x.dim() == 2 and x.shape[1] <= MOST_WIDTH
    return fits and _works(operation, x.device, x.dtype, x.shape[1], drops, torch.is_grad_enabled(), form)


@with_backward
def gelu(x: Tensor, bias: Tensor, tanh: bool = False) -> Forward:
    """gelu(x + bias), with erf or tanh."""
    x = x.contiguous()
    return _kernels().gelu_forward(x, bias, tanh), (x, bias), functools.partial(_kernels().gelu_backward, tanh)


@with_backward
def geglu(x: Tensor) -> Forward:
    """The gelu, with erf, of the left half of each row, times the right half."""
    from pretraining.model import gpu_halves

    x = x.contiguous()
    return gpu_halves.geglu_forward(x), (x,), lambda *given: (gpu_halves.geglu_backward(*given),)


@with_backward
def rotate(qkv: Tensor, positions: Tensor, turns: Tensor, heads: int) -> Forward:
    """Rotates queries and keys, in place; the backward pass rotates their gradients back, in place too."""
    from pretraining.model import gpu_halves

    def rotate_back(grad: Tensor, positions: Tensor, turns: Tensor) -> Gradients:
        return (gpu_halves.rotate(grad, positions, turns, heads, -1.0),)

    return gpu_halves.rotate(qkv, positions, turns, heads, 1.0), (positions, turns), rotate_back


@with_backward
def add_and_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> Forward:
    """The layer norm of residual + dropout(x + bias).

    Saves its inputs and not their sum: the product that reads the residual saves that in any case.
    """
    x, residual, drops = x.contiguous(), residual.contiguous(), _kernels().Drops.from_keys(*masks)
    out, means, scales = _kernels().norm_forward(x, bias, residual, weight, shift, epsilon, drops)
    saved = (x, bias, residual, weight, means, scales)
    return out, saved, functools.partial(_kernels().norm_backward, drops, None)


@with_backward
def add_then_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, epsilon: float, masks: Masks
) -> ForwardOfTwo:
    """residual + dropout(x + bias), and its layer norm. Saves the sum, which the next block reads in any case."""
    x, residual, drops = x.contiguous(), residual.contiguous(), _kernels().Drops.from_keys(*masks)
    total = torch.empty_like(x)
    out, means, scales = _kernels().norm_forward(x, bias, residual, weight, shift, epsilon, drops, total)

    def backward(past: Tensor, grad: Tensor, total: Tensor, *others: Tensor) -> Gradients:
        found: Gradients = _kernels().norm_backward(drops, past, grad, total, None, None, *others)
        return found

    return (total, out), (total, weight, means, scales), backward


@with_backward
def drop(x: Tensor, masks: Masks) -> Forward:
    """Dropout; the backward pass drops the same elements."""
    kernels, drops = _kernels(), _kernels().Drops.from_keys(*masks)
    return kernels.drop(x.contiguous(), drops), (), lambda grad: (kernels.drop(grad, drops),)


def make_row_keys(dropout_seed: int, examples: Array, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Computes the keys of `dropout.make_row_keys` on a GPU: the host hashes sequences, the device hashes pieces."""
    from pretraining.model import gpu_row_keys

    return gpu_row_keys.make_row_keys(hash_key(dropout_seed, *examples.T), positions, starts, longest)


def cross_entropies(logits: Tensor, bias: Tensor, labels: Tensor, vocabulary: int, slopes: bool) -> Losses:
    """Computes the same as `cpu_operations.cross_entropies`."""
    from pretraining.model import gpu_cross_entropy

    return gpu_cross_entropy.cross_entropies(logits, bias, labels, vocabulary, slopes)


def join(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the gradients of queries, keys and values, (n, heads, size) each, to rows, and computes that of the
    bias."""
    return _kernels().join_columns(*map(Tensor.contiguous, (query, key, value)), bias)


@with_backward
def attend(sums: Tensor, bias: Tensor | None, heads: int, where: tuple[Tensor, int, int, int], masks: Masks) -> Forward:
    """Attention over short sequences by queries, keys and values that include their bias, whose gradient is computed
    too; `where` is that of `gpu_attention`."""
    drops = _kernels().Drops.from_keys(*masks)
    from pretraining.model import gpu_attention

    sums, first_head = sums.contiguous(), masks[1] >> 32
    assert drops.keys is None or len(drops.keys) == len(sums), "a key for each row"
    out, spreads, hashes = gpu_attention.attend_forward(sums, heads, where, drops, first_head)
    given = (heads, where, drops, first_head, bias is not None)
    saved = (sums, out, spreads) if hashes is None else (sums, out, spreads, hashes)
    return out, saved, functools.partial(gpu_attention.attend_backward, *given)


def takes_products(x: Tensor) -> bool:
    """Whether matrix products replace slower operations of PyTorch: they also add a tensor, and sum many rows."""
    return x.is_cuda and may_use_kernels()


@with_backward
def look_up_few(ids: Tensor, weight: Tensor) -> Forward:
    """Looks up rows of a weight that has few of them. Its gradient is a product with zeros and ones: PyTorch's own adds
    up the thousands of gradients of each row one after another."""
    return weight[ids], (ids,), functools.partial(_sum_few, len(weight))


def _sum_few(rows: int, grad: Tensor, ids: Tensor) -> Gradients:
    aligned = -(-rows // 8) * 8  # else cuBLAS takes slower kernels
    chosen = ids[:, None] == torch.arange(aligned, device=ids.device)
    return None, (chosen.to(grad.dtype).t() @ grad)[:rows]


@functools.cache
def _kernels() -> Any:
    keep_compiled("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")
    from pretraining.model import gpu_kernels

    return gpu_kernels


@functools.cache
def _works(
    operation: Operation,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    drops: bool,
    learns: bool,
    form: Form = ONE_PIECE,
) -> bool:
    """Whether all kernels that an operation needs compile for such rows and this GPU."""
    global _failed
    try:
        _try(operation, torch.zeros(1, width, dtype=dtype, device=device), drops, learns, form)
    except Exception as error:  # of Triton, a compiler that it calls, or the driver
        _failed = True
        missing = isinstance(error, ImportError)
        said = f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2][:200]}"
        reason = "Triton is not installed (pip install triton)" if missing else f"Triton fails ({said})"
        warnings.warn(f"{reason}: {COST}", stacklevel=2)
    return not _failed


@torch.no_grad()
def _try(operation: Operation, row: Tensor, drops: bool, learns: bool, form: Form) -> None:
    """Sends a row of zeros through the kernels of an operation, with `learns` also backward; waits for nothing."""
    _kernels()
    vector, numbers = row[0], torch.zeros(2, dtype=torch.int32, device=row.device)
    masks, one_piece = (numbers[:1], 0, 0.5 if drops else 0.0), torch.arange(2, dtype=torch.int32, device=row.device)
    trials: dict[str, tuple[Any, ...]] = {
        "gelu": (gelu, row, vector),
        "gelu_tanh": (gelu, row, vector, True),
        "add_and_norm": (add_and_norm, row, vector, row, vector, vector, 1.0, masks),
        "add_then_norm": (add_then_norm, row, vector, row, vector, vector, 1.0, masks),
        "drop": (drop, row, masks),
        "geglu": (geglu, row),
        "attention": (attend, row.repeat(1, 3), vector, form[0], (one_piece, *form[1:]), masks),
        "rotate": (rotate, row, numbers[:1].long(), row.new_zeros(1, len(vector) // 3, dtype=torch.float32), 1),
    }
    if operation in trials:
        function, *inputs = trials[operation]
        out, saved, backward = inspect.unwrap(function)(*inputs)
        if learns:
            backward(*(out if isinstance(out, tuple) else [out]), *saved)
    elif operation == "cross_entropy":
        logits = row.new_zeros(1, USUAL_WORDS)
        cross_entropies(logits, logits[0].clone(), numbers[:1].long(), USUAL_WORDS - 6, learns)
    elif operation == "join":
        join(row, row, row, vector.repeat(3))
    elif operation == "optimizer":
        from pretraining.model import gpu_lamb

        chunks, factor = Chunks.from_stretches([(0, 1)], [0], 1, row.device), row.new_zeros(())
        given = gpu_lamb.Factors((0.9, 0.999), 1.0, 0.0, True, factor + 1, factor, factor)
        gpu_lamb.step([[row[0]] * 4], [chunks], given, lambda squares: squares, True)
    else:
        make_row_keys(0, np.zeros((1, 2), np.int64), numbers[:1].long(), numbers, 1)
