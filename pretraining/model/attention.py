"""Attention over ragged sequences: every piece attends to its own sequence, and nothing is computed for padding.

One function, `attend`, takes what the machine has:

    CPU          sequences of like lengths together: matrix products of the library, the rest in fused kernels
    GPU          the variable-length flash kernels, where they can do what is asked
    elsewhere    sequences of like lengths together, through scaled_dot_product_attention
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretraining.model import cpu_kernels as kernels
from pretraining.model.fused import Dropout

GRAIN = 64
"""Sequences whose lengths are equal when rounded up to it are computed together."""


@dataclass(frozen=True)
class Group:
    """Sequences that are computed together."""

    starts: Tensor
    """(s,) int32: where the sequences begin"""
    lengths: Tensor
    """(s,) int32"""
    length: int
    """length that all of them are padded to"""

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """(s, length) each: the row of every piece, and whether there is one."""
        at = torch.arange(self.length, device=self.starts.device)
        inside = at < self.lengths[:, None]
        return torch.where(inside, self.starts[:, None] + at, 0).long(), inside


class Layout:
    """Where the sequences of a batch lie; made once a batch, for all layers."""

    def __init__(self, starts: Tensor, lengths: tuple[int, ...]):
        self.starts = starts
        self.lengths = lengths
        self.longest = max(lengths)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """As jagged tensors want the starts; one for all, so that they are seen to be of the same form."""
        return self.starts.long()

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The sequences by their lengths, rounded up."""
        rounded: dict[int, list[int]] = {}
        for number, length in enumerate(self.lengths):
            rounded.setdefault(-(-length // GRAIN), []).append(number)
        device = self.starts.device
        sizes = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        groups = []
        for _, members in sorted(rounded.items()):
            longest = max(self.lengths[member] for member in members)
            index = torch.tensor(members, device=device)
            groups.append(Group(self.starts[index], sizes[index], -(-longest // 16) * 16))
        return groups


def attend(qkv: Tensor, bias: Tensor, layout: Layout, heads: int, dropout: Dropout) -> Tensor:
    """(n, 3 * hidden) queries, keys and values, bias still to be added -> (n, hidden)."""
    if kernels.usable(qkv):
        return _GroupedAttention.apply(qkv, bias, layout, heads, dropout)
    query, key, value = (qkv + bias).view(len(qkv), 3, heads, -1).unbind(1)  # (n, heads, size) each
    if qkv.is_cuda and qkv.dtype in (torch.bfloat16, torch.float16):
        out = _flash(query, key, value, layout, dropout.probability)
    else:
        out = _grouped(query, key, value, layout, dropout.probability)
    return out.reshape(len(qkv), -1)


def _grouped(query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Attention for any device and type: query, key, value (n, heads, size) -> (n, heads, size)."""
    out = torch.empty_like(query)
    for group in layout.groups:
        rows, inside = group.rows
        q, k, v = (part[rows].transpose(1, 2) for part in (query, key, value))  # (s, heads, length, size)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=inside[:, None, None], dropout_p=dropout)
        out = out.index_put((rows[inside],), context.transpose(1, 2)[inside])
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Attention on a GPU, by kernels that need no padding."""
    starts, longest = layout.starts, layout.longest
    if (flash_attention := _flash_attention()) is not None:
        return flash_attention(query, key, value, starts, starts, longest, longest, dropout_p=dropout)
    if not dropout and query.shape[-1] % 8 == 0 and torch.cuda.get_device_capability(query.device) >= (8, 0):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(query, key, value, starts, starts, longest, longest)
        assert isinstance(out, Tensor)
        return out
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(  # told the lengths, it need not ask the GPU for them
            each, layout.offsets, min_seqlen=min(layout.lengths), max_seqlen=longest
        ).transpose(1, 2)
        for each in (query, key, value)
    )
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).values()


@functools.cache
def _flash_attention() -> Callable[..., Tensor] | None:
    """The flash-attn package's function, where it is installed and works with this PyTorch."""
    if not kernels.allowed():
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return cast(Callable[..., Tensor], flash_attn_varlen_func)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, layout: Layout, heads: int, dropout: Dropout) -> Tensor:
        n, hidden, size = len(qkv), qkv.shape[1] // 3, qkv.shape[1] // 3 // heads
        out = qkv.new_empty(n, hidden)
        saved = []
        for group in layout.groups:
            s, length = len(group.starts), group.length
            parts = qkv.new_empty(3, s * heads, length, size)
            kernels.call("split_heads", qkv, bias, group.starts, group.lengths, parts, 3, s, heads, length, size)
            query, key, value = parts
            shares = query @ key.transpose(1, 2)  # (s * heads, length, length): scores, then softmax
            dropped = torch.empty_like(shares) if dropout.probability else shares
            where = (group.starts, group.lengths, dropout.keys, dropout.site, float(dropout.probability))
            kernels.call("softmax_forward", shares, *where, size**-0.5, dropped, s, heads, length)
            context = dropped @ value
            kernels.call("merge_heads", context, group.starts, group.lengths, out, None, 1, s, heads, length, size)
            saved += [parts, shares]
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.heads, ctx.dropout = layout, heads, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, dropout = ctx.heads, ctx.dropout
        n, hidden = grad.shape
        size, grad = hidden // heads, grad.contiguous()
        grad_qkv, grad_bias = grad.new_empty(n, 3 * hidden), torch.zeros(3 * hidden)
        saved = iter(ctx.saved_tensors)
        for group, parts, shares in zip(ctx.layout.groups, saved, saved, strict=True):
            query, key, value = parts
            s, length = len(group.starts), group.length
            grad_context = torch.empty_like(query)
            kernels.call(
                "split_heads", grad, None, group.starts, group.lengths, grad_context, 1, s, heads, length, size
            )
            dropped = shares
            if dropout.probability:
                dropped = torch.empty_like(shares)
                where = (group.starts, group.lengths, dropout.keys, dropout.site, float(dropout.probability))
                kernels.call("redo_dropout", shares, *where, dropped, s, heads, length)
            grad_scores = grad_context @ value.transpose(1, 2)
            grad_parts = torch.empty_like(parts)
            torch.bmm(dropped.transpose(1, 2), grad_context, out=grad_parts[2])
            kernels.call("softmax_backward", grad_scores, shares, dropped, group.lengths, size**-0.5, s, heads, length)
            torch.bmm(grad_scores, key, out=grad_parts[0])
            torch.bmm(grad_scores.transpose(1, 2), query, out=grad_parts[1])
            kernels.call(
                "merge_heads", grad_parts, group.starts, group.lengths, grad_qkv, grad_bias, 3, s, heads, length, size
            )
        return grad_qkv, grad_bias.to(grad.dtype), None, None, None
