"""The operations on a GPU, in Triton, that combine two halves of a row: gates of GELU, and rotary positions."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# compiled functions have the types of their first call

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretraining.model import gpu_kernels as kernels
from pretraining.model.gpu_kernels import _gelu, _read
from pretraining.model.gpu_tiles import COLUMNS, Tile


@triton.jit(do_not_specialize=["rows"])
def _geglu_forward(x, out, rows, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Computes the gelu of the left half of rows of 2 * width numbers, times the right half."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    left, inside = row * (2 * width) + column, (row < rows) & (column < width)
    result, _ = _gelu(_read(x, left, inside), False)
    tl.store(out + row * width + column, result * _read(x, left + width, inside), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _geglu_backward(grad, x, grad_x, rows, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    left, inside = row * (2 * width) + column, (row < rows) & (column < width)
    result, slope = _gelu(_read(x, left, inside), False)
    found = _read(grad, row * width + column, inside)
    tl.store(grad_x + left, found * _read(x, left + width, inside) * slope, mask=inside)
    tl.store(grad_x + left + width, found * result, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x,
    positions,
    turns,
    rows,
    direction,
    half: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Rotates the width pairs of queries and keys in rows of 3 * width numbers; heads have 2 * half of them."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    pair = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    inside = (row < rows) & (pair < width)
    angle = tl.load(positions + row, mask=row < rows, other=0) * (2 * half) + pair % half
    cosine, sine = _read(turns, angle, inside), _read(turns, angle + half, inside) * direction
    left = row * (3 * width) + pair // half * (2 * half) + pair % half
    one, other = _read(x, left, inside), _read(x, left + half, inside)
    tl.store(x + left, one * cosine - other * sine, mask=inside)
    tl.store(x + left + half, other * cosine + one * sine, mask=inside)


def geglu_forward(x: Tensor) -> Tensor:
    """Computes the gelu of the left half of each row, times the right half."""
    width = x.shape[1] // 2
    out, tile = x.new_empty(len(x), width), Tile.from_gelu_width(width)
    kernels._launch_rows(_geglu_forward, tile, x, out, len(x))
    return out


def geglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Computes the gradient of x."""
    grad_x, tile = torch.empty_like(x), Tile.from_gelu_width(grad.shape[1])
    kernels._launch_rows(_geglu_backward, tile, grad, x, grad_x, len(x))
    return grad_x


def rotate(x: Tensor, positions: Tensor, turns: Tensor, heads: int, direction: float) -> Tensor:
    """Rotates the queries and keys of rows in place, forward (1.0) or back (-1.0)."""
    half, tile = turns.shape[1] // 2, Tile.from_width(heads * turns.shape[1], COLUMNS)
    grid = (-(-len(positions) // tile.rows), tile.parts)
    kernels._launch(_rotate, grid, tile, x, positions, turns, len(positions), direction, half=half)
    return x
