"""How ranks that share a model divide a weight, by its declared cut. Nothing here loads PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Cut = Literal["columns", "rows", "vocabulary", "whole"]
"""How ranks that share a model divide a linear layer: by its outputs (the rows of each joined part, and the bias), by
its inputs (the columns of the weight, whose products are then added up), by pieces of the vocabulary, or not at all.
The names are those of the matrix that multiplies row vectors, as in Megatron-LM: `columns` are outputs."""
VOCABULARY_SHARE = 128
"""The rows of the vocabulary that a rank holds are a multiple of this; rows of zeros fill the last shares."""


class Division(NamedTuple):
    """The way in which a weight is divided."""

    cut: Cut
    parts: int
    """number of weights that are joined in it, row after row"""
    rows: int = 0
    """its rows before it is divided, for `join_shares`"""


def cut_tensor(whole: Tensor, division: Division, rank: int, ranks: int) -> Tensor:
    """Returns the share of a rank among those that divide a weight; without a copy where memory allows it."""
    cut, parts, _ = division
    if cut == "whole" or ranks == 1:
        return whole
    if cut == "rows":
        return whole.chunk(ranks, 1)[rank]
    if cut == "vocabulary":
        size = find_share_size(whole.shape, division, ranks)
        own = whole[rank * size[0] : (rank + 1) * size[0]]
        if len(own) == size[0]:
            return own
        padded = whole.new_zeros(size)
        padded[: len(own)] = own
        return padded
    return whole.reshape(parts, ranks, -1, *whole.shape[1:])[:, rank].flatten(0, 1)


def find_share_size(size: Sequence[int], division: Division, ranks: int) -> tuple[int, ...]:
    """Returns the size of each rank's share of a weight of this size."""
    if division.cut == "rows":
        return size[0], size[1] // ranks
    padding = -size[0] % (VOCABULARY_SHARE * ranks) if division.cut == "vocabulary" else 0
    return (size[0] + padding) // ranks, *size[1:]


def find_whole_size(share: Sequence[int], division: Division, ranks: int) -> tuple[int, ...]:
    """Returns the size of a weight of which each rank has a share of this size: the inverse of `find_share_size`."""
    return (share[0], share[1] * ranks) if division.cut == "rows" else (division.rows, *share[1:])


def join_shares(shares: Sequence[Tensor], division: Division) -> Tensor:
    """Joins the shares of all ranks: the inverse of `cut_tensor`."""
    import torch

    cut, parts, rows = division
    if cut == "rows":
        return torch.cat([*shares], 1)
    parts = 1 if cut == "vocabulary" else parts
    return torch.cat([share.view(parts, -1, *share.shape[1:]) for share in shares], 1).flatten(0, 1)[:rows]


def find_crossing(tensor: int, per_node: int, across_nodes: bool = False) -> str | None:
    """Says why `tensor` ranks cannot share a model where a node has so many ranks; None if they can, or if they may be
    on several nodes."""
    if per_node % tensor == 0 or (across_nodes and tensor % per_node == 0):
        return None
    slow = "a multiple of them (with parallel.across_nodes = true: sums between nodes are slow)"
    return f"parallel.tensor = {tensor}: does not divide the {per_node} ranks of a node; take a divisor, or {slow}"
