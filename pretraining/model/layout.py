"""What every layout of attention has: the places of the sequences of a batch, and the kernels over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pretraining.model.dropout import Dropout

WHOLE = 1 << 30
"""The window of our kernels where there is no limit: longer than any sequence."""
Attend = Callable[[Tensor, "Tensor | None", int, Dropout], Tensor]
"""Queries, keys and values, their bias, the number of heads, and dropout -> (n, hidden)."""


class Layout(Protocol):
    """The places of the sequences of a batch, and the kernels of attention over them."""

    turns: tuple[Tensor, Tensor] | None = None
    """for layers with rotary positions: the positions of pieces, (n,), and the table of `make_turns`"""

    def attend(self, qkv: Tensor, bias: Tensor | None, heads: int, dropout: Dropout) -> Tensor:
        """Computes attention, (n, hidden), from queries, keys and values, (n, 3 * hidden), and their bias, if any."""

    def attends_sums(self, states: Tensor) -> Attend | None:  # noqa: ARG002
        """Returns the function for queries, keys and values to which the product has added the bias already; the
        function computes the gradient of the bias. None where `attend` adds it."""
        return None

    def spare_rows(self, states: Tensor, packed: bool = False) -> int:  # noqa: ARG002
        """The number of rows of zeros to append to the hidden states, which belong to no sequence; `packed` says
        whether weights are in oneDNN's own order."""
        return 0


def split_ways(count: int, one_way: bool, first: int) -> list[tuple[slice, bool]]:
    """Splits `count` sequences into those that see one way and those that see both; leaves out what is empty."""
    if one_way or not first:
        return [(slice(count), one_way)]
    parts = [(slice(first), True), (slice(first, count), False)]
    return parts[: 1 + (first < count)]


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Adds a bias if there is one."""
    return x if bias is None else x + bias
