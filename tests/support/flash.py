"""A stand-in for PyTorch's flash kernels: it makes the same demands, and computes on a CPU what they compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from support.attention import hidden_from
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD = torch.ops.aten._flash_attention_forward.default
BACKWARD = torch.ops.aten._flash_attention_backward.default


class FlashKernels(TorchDispatchMode):
    """Takes the place of the kernels; dropout is noted and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[float] = []
        """what was asked to be dropped, call by call"""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is FORWARD:
            return self._forward(*arguments, **(named or {}))
        if function is BACKWARD:
            return self._backward(*arguments, **(named or {}))
        return function(*arguments, **(named or {}))

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        starts_of_keys: Tensor,
        longest: int,
        longest_of_keys: int,
        dropout: float,
        causal: bool,
        return_mask: bool,
        *,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        _demand(query, key, value, starts, starts_of_keys, longest, longest_of_keys)
        assert not return_mask
        self.dropouts.append(dropout)
        sums = torch.empty(query.shape[1], len(query), dtype=torch.float32)
        state = torch.empty(2, dtype=torch.uint64)
        unused = torch.empty((), dtype=torch.uint64)
        window = _window(causal, window_size_left, window_size_right)
        return _attend(query, key, value, starts, causal, window), sums, state, unused, query.new_empty(0)

    def _backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        starts: Tensor,
        starts_of_keys: Tensor,
        longest: int,
        longest_of_keys: int,
        dropout: float,
        causal: bool,
        *_: Any,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **__: Any,
    ) -> tuple[Tensor, ...]:
        _demand(query, key, value, starts, starts_of_keys, longest, longest_of_keys)
        assert grad.shape == out.shape == query.shape
        assert grad.dtype == query.dtype
        assert sums.shape == (query.shape[1], len(query))
        self.dropouts.append(dropout)
        return _slopes(query, key, value, grad, starts, causal, _window(causal, window_size_left, window_size_right))


def _window(causal: bool, left: int | None, right: int | None) -> int | None:
    """The distance to which a piece sees; causal kernels replace the right one by 0."""
    assert (left is None) == (right is None)
    assert right == (0 if causal and left is not None else left), "on both sides alike"
    return left


def _demand(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, starts_of_keys: Tensor, longest: int, of_keys: int
) -> None:
    """What the kernels check before they compute."""
    for part in (query, key, value):
        assert part.dtype in (torch.float16, torch.bfloat16), "type"
        assert part.dim() == 3, "pieces, heads, size"
        assert part.shape == query.shape
        assert part.stride(-1) == 1, "a head's numbers lie side by side"
        assert part.shape[-1] % 8 == 0, "width of a head"
        assert part.shape[-1] <= 256, "width of a head"
    for offsets in (starts, starts_of_keys):
        assert offsets.dtype == torch.int32, "offsets"
        assert offsets.dim() == 1, "offsets"
        assert offsets.is_contiguous(), "offsets"
        assert int(offsets[0]) == 0, "offsets"
        assert int(offsets[-1]) == len(query), "offsets"
    assert max(int(end - begin) for begin, end in pairwise(starts)) <= min(longest, of_keys), "longest"


def _sequences(starts: Tensor, *parts: Tensor) -> Iterator[list[Tensor]]:
    """The same sequence of every part, (heads, length, size) in fp32, sequence by sequence."""
    for begin, end in pairwise(starts.tolist()):
        yield [part[begin:end].transpose(0, 1).float() for part in parts]


def _shares(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor:
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(hidden_from(query.shape[1], causal, window), -torch.inf), -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool, window: int | None) -> Tensor:
    outputs = [_shares(q, k, causal, window) @ v for q, k, v in _sequences(starts, query, key, value)]
    return torch.cat([out.transpose(0, 1) for out in outputs]).to(query.dtype)


def _slopes(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, starts: Tensor, causal: bool, window: int | None
) -> tuple[Tensor, ...]:
    scale, found = query.shape[-1] ** -0.5, []
    for q, k, v, g in _sequences(starts, query, key, value, grad):
        shares = _shares(q, k, causal, window)
        of_shares = g @ v.transpose(1, 2)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        found.append([of_scores @ k, of_scores.transpose(1, 2) @ q, shares.transpose(1, 2) @ g])
    return tuple(
        torch.cat([part.transpose(0, 1) for part in parts]).to(query.dtype) for parts in zip(*found, strict=True)
    )
