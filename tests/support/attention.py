"""Attention written out in fp64, and what takes the place of PyTorch's flash kernels: it demands what they demand."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from support.operations import NONE as NONE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretraining.model.batch import Batch

FORWARD = torch.ops.aten._flash_attention_forward.default
BACKWARD = torch.ops.aten._flash_attention_backward.default


def inputs(pieces: int, hidden: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of pieces, and a bias."""
    generator = torch.Generator().manual_seed(4)
    shapes = (pieces, 3 * hidden), (3 * hidden,)
    qkv, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return qkv, bias


def with_slopes(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """What attention gives, and its gradients, on the host."""
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [each.detach().cpu() for each in (out, *torch.autograd.grad((out * weight).sum(), inputs))]


def attend_plainly(
    batch: Batch,
    qkv: Tensor,
    bias: Tensor,
    heads: int,
    one_way: bool = False,
    window: int | None = None,
    first: int = 0,
) -> list[Tensor]:
    """A softmax for each sequence, in fp64, without what lies behind a piece (`one_way`, or one of the first sequences)
    or too far from it; and the gradients of queries, keys and values and of the bias."""
    outputs = []
    for number, part in enumerate((qkv.double() + bias.double()).split(list(batch.lengths))):
        query, key, value = part.view(len(part), 3, heads, -1).permute(1, 2, 0, 3)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        hidden = hidden_from(len(part), one_way or number < first, window)
        shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        outputs.append((shares @ value).transpose(0, 1).flatten(1))
    return with_slopes(torch.cat(outputs), qkv, bias)


def hidden_from(length: int, one_way: bool, window: int | None) -> Tensor:
    """Which pieces of a sequence a piece does not see, (length, length)."""
    away = torch.arange(length) - torch.arange(length)[:, None]
    return (away > 0) & one_way | (away.abs() > (length if window is None else window))


def furthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest error, as a share of what is largest in each tensor (1 at least)."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) / max(1, float(other.abs().max())) for one, other in pairs)


def assert_attends(ours: Sequence[Tensor], theirs: Sequence[Tensor], of_sum: float, tolerance: float) -> None:
    """Compares what comes out and the gradients; that of the bias is a sum of all rows, which nearly cancel."""
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    assert furthest(ours[:2], theirs[:2]) < tolerance
    if len(theirs) > 2:
        rows = float(theirs[1].abs().sum(0).max())
        assert float((ours[2] - theirs[2]).abs().max()) < of_sum * max(5, rows)


class FlashKernels(TorchDispatchMode):
    """Takes the place of the kernels; dropout is noted and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[float] = []
        """what was asked to be dropped, call by call"""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in (FORWARD, BACKWARD):
            return function(*arguments, **(named or {}))
        names = [each.name for each in function._schema.arguments]
        given = dict(zip(names, arguments, strict=False)) | dict(named or {})
        self.dropouts.append(given["dropout_p"])
        query = _demand(given)
        if function is BACKWARD:
            assert given["grad_out"].shape == given["out"].shape == query.shape
            assert given["grad_out"].dtype == query.dtype
            assert given["logsumexp"].shape == (query.shape[1], len(query))
            return _compute(given, given["grad_out"])
        assert not given["return_debug_mask"]
        sums = torch.empty(query.shape[1], len(query), dtype=torch.float32)
        state, unused = (torch.empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        return *_compute(given, None), sums, state, unused, query.new_empty(0)


def _demand(given: Mapping[str, Any]) -> Tensor:
    """Checks what the kernels check before they compute; returns the queries."""
    query: Tensor = given["query"]
    for part in (query, given["key"], given["value"]):
        assert part.dtype in (torch.float16, torch.bfloat16), "type"
        assert part.dim() == 3, "pieces, heads, size"
        assert part.shape == query.shape
        assert part.stride(-1) == 1, "a head's numbers lie side by side"
        assert part.shape[-1] % 8 == 0, "width of a head"
        assert part.shape[-1] <= 256, "width of a head"
    for offsets in (given["cum_seq_q"], given["cum_seq_k"]):
        assert offsets.dtype == torch.int32
        assert offsets.dim() == 1
        assert offsets.is_contiguous()
        assert [int(offsets[0]), int(offsets[-1])] == [0, len(query)]
        assert int(offsets.diff().max()) <= min(given["max_q"], given["max_k"]), "longest"
    return query


def _compute(given: Mapping[str, Any], grad: Tensor | None) -> tuple[Tensor, ...]:
    """Attention, or by the gradient of what it gave those of queries, keys and values; sequence by sequence in fp32."""
    causal, left, right = given["is_causal"], given.get("window_size_left"), given.get("window_size_right")
    assert right == (0 if causal and left is not None else left), "on both sides alike; causal kernels put 0"
    found, dtype = [], given["query"].dtype
    for begin, end in pairwise(given["cum_seq_q"].tolist()):
        parts = [given[name] for name in ("query", "key", "value")] + ([] if grad is None else [grad])
        query, key, value, *slope = (part[begin:end].transpose(0, 1).float() for part in parts)
        scale = query.shape[-1] ** -0.5
        scores = query @ key.transpose(1, 2) * scale
        shares = torch.softmax(scores.masked_fill(hidden_from(end - begin, causal, left), -torch.inf), -1)
        if slope:
            of_shares = slope[0] @ value.transpose(1, 2)
            of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
            found.append([of_scores @ key, of_scores.transpose(1, 2) @ query, shares.transpose(1, 2) @ slope[0]])
        else:
            found.append([shares @ value])
    return tuple(torch.cat([part.transpose(0, 1) for part in parts]).to(dtype) for parts in zip(*found, strict=True))
