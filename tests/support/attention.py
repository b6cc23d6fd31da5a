"""What attention is compared with, and on what."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretraining.model.batch import Batch
from pretraining.model.dropout import Dropout

NONE = Dropout(0.0, torch.empty(0, dtype=torch.int32))


def inputs(pieces: int, hidden: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of pieces, and a bias."""
    generator = torch.Generator().manual_seed(4)
    shapes = (pieces, 3 * hidden), (3 * hidden,)
    qkv, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return qkv, bias


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)


def attend_plainly(
    batch: Batch, qkv: Tensor, bias: Tensor, heads: int, one_way: bool = False, window: int | None = None
) -> Tensor:
    """A softmax for each sequence, in fp64, without what lies behind a piece (`one_way`) or too far from it."""
    outputs = []
    for part in (qkv.double() + bias.double()).split(list(batch.lengths)):  # type: ignore[no-untyped-call]
        query, key, value = part.view(len(part), 3, heads, -1).permute(1, 2, 0, 3)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        shares = torch.softmax(scores.masked_fill(hidden_from(len(part), one_way, window), -torch.inf), -1)
        outputs.append((shares @ value).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def hidden_from(length: int, one_way: bool, window: int | None) -> Tensor:
    """Which pieces of a sequence a piece does not see, (length, length)."""
    away = torch.arange(length) - torch.arange(length)[:, None]
    return (away > 0) & one_way | (away.abs() > (length if window is None else window))


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest error, as a share of what is largest in each tensor (1 at least)."""
    return max(
        float((one - other).abs().max()) / max(1, float(other.abs().max()))
        for one, other in zip(ours, theirs, strict=True)
    )
