"""The operations between matrix products: our fused kernels on a CPU, and on a GPU with Triton; elsewhere PyTorch's.

Their results are equal but for rounding and for the masks of dropout. Our kernels draw the same masks on CPU and GPU.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.mesh.mesh import ALONE, Mesh, sum_over_tensor_ranks
from pretraining.model import cpu_kernels as kernels
from pretraining.model import cpu_operations
from pretraining.model import gpu_operations as gpu
from pretraining.model.dropout import Dropout
from pretraining.model.own_backward import Forward, Gradients, with_backward

TAKES_ROWS = "takes_rows"
"""The attribute of a table whose gradient may be a sparse tensor of some rows."""
torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 warns where nobody has chosen


def find_operations(name: gpu.Operation, x: Tensor, masks: kernels.Masks | None = None) -> ModuleType | None:
    """Finds the module whose kernels can compute an operation on this tensor; None where PyTorch computes it."""
    if kernels.usable(x):
        return cpu_operations
    return gpu if gpu.usable(name, x, masks) else None


def widen(x: Tensor) -> Tensor:
    """Converts 16 bits to fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gelu(x: Tensor, bias: Tensor | None, tanh: bool = False) -> Tensor:
    """gelu(x + bias), with erf or its approximation by tanh. May overwrite x, which nobody else may read."""
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    ours = find_operations("gelu_tanh" if tanh else "gelu", x)
    return ours.gelu(x, bias, tanh) if ours else F.gelu(x + bias, approximate="tanh" if tanh else "none")


def geglu(x: Tensor) -> Tensor:
    """The gelu, with erf, of the left half of each row times the right half: (n, 2 * inner) -> (n, inner)."""
    if ours := find_operations("geglu", x):
        return ours.geglu(x)
    left, right = x.chunk(2, 1)
    return F.gelu(left) * right


@cache
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
    if ours := find_operations("rotate", qkv):
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
    masks = dropout.for_kernels
    if ours := find_operations("add_and_norm", x, masks):
        return ours.add_and_norm(x, bias, residual, weight, shift, epsilon, masks)
    return F.layer_norm(residual + F.dropout(x + bias, dropout.probability), weight.shape, weight, shift, epsilon)


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
    masks = dropout.for_kernels
    if ours := find_operations("add_then_norm", x, masks):
        bias, shift = (x.new_zeros(x.shape[1]) if each is None else each for each in (bias, shift))
        return ours.add_then_norm(x, bias, residual, weight, shift, epsilon, masks)
    total = residual + F.dropout(x if bias is None else x + bias, dropout.probability)
    return total, F.layer_norm(total, weight.shape, weight, shift, epsilon)


def drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout."""
    if not dropout.probability:
        return x
    ours = find_operations("drop", x, dropout.for_kernels)
    return ours.drop(x, dropout.for_kernels) if ours else F.dropout(x, dropout.probability)


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
    out = F.embedding(ids[0], word)
    for table, places in zip(tables, ids[1:], strict=True):
        out.add_(F.embedding(places, table))
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
