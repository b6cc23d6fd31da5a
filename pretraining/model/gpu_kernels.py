"""The operations between matrix products on a GPU, in Triton: each passes over memory once.

Numbers are stored in 16 or 32 bits and computed in 32. Sums over rows are computed by blocks of rows, then over the
blocks, in an order that follows from the number of rows: the same input gives the same bits. Masks of dropout are not
stored: the backward pass computes the hash of kernels/numbers.h again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretraining.model.gpu_tiles import COLUMNS, GELU_BLOCKS, JOIN_BLOCKS, NORM_BLOCKS, SUM_COLUMNS, Drops, Tile

HASH_STEP = tl.constexpr(0x9E3779B9)
DENSITY_AT_0, HALF_ROOT_OF_HALF = tl.constexpr(0.3989422804014327), tl.constexpr(0.3535533905932738)
HALF_IN_BITS = tl.constexpr(-0.7213475204444817)


@triton.jit
def _scramble(x):
    """Hashes uint32: every bit of the result depends on every bit of x (Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hash_rows(keys, row, known, site):
    """Hashes the keys of rows and the site."""
    key = tl.load(keys + row, mask=known, other=0).to(tl.uint32, bitcast=True)
    return _scramble(key ^ site.to(tl.uint32, bitcast=True))


@triton.jit
def _draw_columns(hashed_rows, column, threshold, scale):
    """Dropout factors of shape (rows, columns): 0 where dropped, else the scale."""
    hashed = _scramble(column.to(tl.uint32) * HASH_STEP + hashed_rows)
    return tl.where(hashed < threshold.to(tl.uint32, bitcast=True), 0.0, scale)


@triton.jit
def _draw_dropout(keys, row, column, known, site, threshold, scale):
    """Dropout factors of shape (rows, columns), by the keys of rows."""
    return _draw_columns(_hash_rows(keys, row, known, site), column, threshold, scale)


@triton.jit
def _read(pointer, at, inside):
    """Reads numbers as fp32; 0 outside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tail(value):
    """Computes the share of a normal distribution beyond |value|, and exp(-value² / 2).

    The share is the latter times a polynomial in t = 1 / (1 + |value| / √8), fitted to erfc. Its relative error is
    2e-7, also for large values, where 1 - erf has no digits left. It takes half the instructions of `tl.erf`.
    """
    bell = tl.exp2(value * value * HALF_IN_BITS)
    t = tl.rsqrt(tl.abs(value) * HALF_ROOT_OF_HALF + 1.0)
    t *= t
    tail = 0.0317832877 - 0.0126643714 * t
    tail = 0.016242437 + tail * t
    tail = tail * t - 0.100187343
    tail = 0.0403043205 + tail * t
    tail = 0.0289168662 + tail * t
    tail = 0.0902544015 + tail * t
    tail = 0.123250548 + tail * t
    tail = 0.141052407 + tail * t
    tail = 0.141047369 + tail * t
    return tail * t * bell, bell


@triton.jit
def _gelu(value, tanh: tl.constexpr):
    """Computes gelu, with erf or tanh, and its slope; the compiler leaves out the one that nobody reads."""
    if tanh:
        square = value * value
        below = tl.sigmoid(value * (square * 0.071354816 + 1.5957691))  # that is (1 + tanh) / 2
        result = value * below
        slope = below + result * (1.0 - below) * (square * 0.21406445 + 1.5957691)
    else:
        tail, bell = _tail(value)
        result = tl.maximum(value, 0.0) - tl.abs(value) * tail
        slope = tl.where(value < 0, tail, 1.0 - tail) + value * bell * DENSITY_AT_0
    return result, slope


@triton.jit(do_not_specialize=["rows"])
def _gelu_forward(
    x, bias, out, rows, tanh: tl.constexpr, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    at, inside = row * width + column, (row < rows) & (column < width)
    value = _read(x, at, inside) + _read(bias, column, column < width)
    result, _ = _gelu(value, tanh)
    tl.store(out + at, result, mask=inside)


@triton.jit(do_not_specialize=["rows", "block"])
def _gelu_backward(
    grad,
    x,
    bias,
    grad_x,
    sums,
    rows,
    block,
    tanh: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Computes the gradient of x, and its sums over a block of rows: the first stage of the bias's gradient."""
    number = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    column, known = columns[None, :], columns[None, :] < width
    added = _read(bias, column, known)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for begin in range(0, block, tile_rows):
        row = number * block + begin + tl.arange(0, tile_rows)[:, None]
        at, inside = row * width + column, (row < rows) & known
        value = _read(x, at, inside) + added
        _, slope = _gelu(value, tanh)
        result = _read(grad, at, inside) * slope
        tl.store(grad_x + at, result, mask=inside)
        total += result
    tl.store(sums + number * width + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def _norm_forward(
    x,
    bias,
    residual,
    weight,
    shift,
    keys,
    total,
    out,
    means,
    scales,
    rows,
    site,
    threshold,
    scale_kept,
    epsilon,
    chains: tl.constexpr,
    drops: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.arange(0, tile_columns)[None, :]
    present, known = row < rows, column < width
    at, inside = row * width + column, present & known
    value = _read(x, at, inside) + _read(bias, column, known)
    if drops:
        value *= _draw_dropout(keys, row, column, present, site, threshold, scale_kept)
    value += _read(residual, at, inside)
    if chains:  # the norm is that of the sum as it is stored
        value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, value, mask=inside)
    mean = tl.sum(value, 1)[:, None] / width
    apart = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 1)[:, None] / width + epsilon)
    result = apart * scale * _read(weight, column, known) + _read(shift, column, known)
    tl.store(out + at, result, mask=inside)
    tl.store(means + row, mean, mask=present)
    tl.store(scales + row, scale, mask=present)


@triton.jit
def _before_norm(slope, normed, width):
    """Computes the gradient of the input of a norm, without its scale, from that of the output."""
    first, second = tl.sum(slope, 1)[:, None] / width, tl.sum(slope * normed, 1)[:, None] / width
    return slope - first - normed * second


@triton.jit
def _store_sums(sums, columns, width, first, second, third):
    """Stores the sums over the rows of three tiles, one behind the other."""
    tl.store(sums + columns, tl.sum(first, 0), mask=columns < width)
    tl.store(sums + width + columns, tl.sum(second, 0), mask=columns < width)
    tl.store(sums + 2 * width + columns, tl.sum(third, 0), mask=columns < width)


@triton.jit(do_not_specialize=["rows", "block", "site", "threshold"])
def _norm_backward(
    grad,
    past,
    x,
    bias,
    residual,
    weight,
    keys,
    means,
    scales,
    grad_residual,
    grad_x,
    sums,
    rows,
    block,
    site,
    threshold,
    scale_kept,
    chains: tl.constexpr,
    drops: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Computes the gradients of the residual and of x (equal without dropout), and the sums of a block for the
    others. With `chains`, x is the sum that was normalised, and `past` its own gradient."""
    number, columns = tl.program_id(0).to(tl.int64), tl.arange(0, tile_columns)
    column, known = columns[None, :], columns[None, :] < width
    factor = _read(weight, column, known)
    if not chains:
        added = _read(bias, column, known)
    nothing = tl.zeros([tile_rows, tile_columns], tl.float32)
    to_weight, to_shift, to_bias = nothing, nothing, nothing
    for begin in range(0, block, tile_rows):
        row = number * block + begin + tl.arange(0, tile_rows)[:, None]
        present = row < rows
        at, inside = row * width + column, present & known
        slope, value = _read(grad, at, inside), _read(x, at, inside)
        if drops:
            kept = _draw_dropout(keys, row, column, present, site, threshold, scale_kept)
        if not chains:
            value += added
            if drops:
                value *= kept
            value += _read(residual, at, inside)
        scale = _read(scales, row, present)
        normed = (value - _read(means, row, present)) * scale
        result = scale * _before_norm(slope * factor, normed, width)
        if chains:
            result += _read(past, at, inside)
        tl.store(grad_residual + at, result, mask=inside)
        if drops:
            result *= kept
            tl.store(grad_x + at, result, mask=inside)
        to_weight, to_shift, to_bias = to_weight + slope * normed, to_shift + slope, to_bias + result
    _store_sums(sums + number * (3 * width), columns, width, to_weight, to_shift, to_bias)


@triton.jit(do_not_specialize=["count"])
def _sum_blocks(sums, out, count, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    """Adds up the sums of all blocks: the second stage of a sum over rows."""
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for begin in range(0, count, tile_rows):
        block = begin + tl.arange(0, tile_rows)[:, None]
        total += _read(sums, block * width + columns[None, :], (block < count) & (columns[None, :] < width))
    tl.store(out + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def _dropout(
    x, keys, out, rows, site, threshold, scale, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)[None, :]
    at, present = row * width + column, row < rows
    inside = present & (column < width)
    kept = _draw_dropout(keys, row, column, present, site, threshold, scale)
    tl.store(out + at, _read(x, at, inside) * kept, mask=inside)


@triton.jit(do_not_specialize=["rows", "block"])
def _join(
    query, key, value, out, sums, rows, block, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    """Lays the rows of three tensors side by side; sums them over a block: the first stage of the bias's gradient."""
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    column, known = columns[None, :], columns[None, :] < width
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for begin in range(0, block, tile_rows):
        row = number * block + begin + tl.arange(0, tile_rows)[:, None]
        at, inside = row * width + column, (row < rows) & known
        found = _read(query, at, inside & (part == 0))
        found += _read(key, at, inside & (part == 1)) + _read(value, at, inside & (part == 2))
        tl.store(out + row * (3 * width) + part * width + column, found, mask=inside)
        total += found
    tl.store(sums + number * (3 * width) + part * width + columns, tl.sum(total, 0), mask=columns < width)


def gelu_forward(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """gelu(x + bias), with erf or tanh."""
    out, tile = torch.empty_like(x), Tile.from_gelu_width(x.shape[1])
    _launch_rows(_gelu_forward, tile, x, bias, out, len(x), tanh=tanh)
    return out


def gelu_backward(tanh: bool, grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of x and of the bias."""
    grad_x, tile = torch.empty_like(x), Tile.from_gelu_width(x.shape[1])
    count, block = tile.blocks(len(x), GELU_BLOCKS)
    sums = x.new_empty(count, x.shape[1], dtype=torch.float32)
    _launch(_gelu_backward, (count, tile.parts), tile, grad, x, bias, grad_x, sums, len(x), block, tanh=tanh)
    return grad_x, _add_blocks(sums, bias)


def norm_forward(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor,
    epsilon: float,
    drops: Drops,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the layer norm of residual + dropout(x + bias), and the mean and the scale of every row; writes the sum
    to `total`, if there is one."""
    out, tile = torch.empty_like(x), Tile.from_norm_width(x.shape[1])
    means = x.new_empty(len(x), dtype=torch.float32)
    scales = torch.empty_like(means)
    tensors = (x, bias, residual, weight, shift, drops.keys, total, out, means, scales)
    chains = total is not None
    numbers = (len(x), *drops[1:], epsilon)
    _launch_rows(_norm_forward, tile, *tensors, *numbers, chains=chains, drops=drops.keys is not None)
    return out, means, scales


def norm_backward(
    drops: Drops,
    past: Tensor | None,
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of x, the bias, the residual, the weight and the shift. Without dropout, those of x and
    the residual are one tensor. Where the sum has a gradient `past` its norm, x is the sum, without bias and
    residual."""
    grad_residual, tile = torch.empty_like(x), Tile.from_norm_width(x.shape[1], backward=True)
    grad_x = grad_residual if drops.keys is None else torch.empty_like(x)
    count, block = tile.blocks(len(x), NORM_BLOCKS)
    sums = x.new_empty(count, 3 * x.shape[1], dtype=torch.float32)
    tensors = (grad, past, x, bias, residual, weight, drops.keys, means, scales, grad_residual, grad_x, sums)
    constants = {"chains": past is not None, "drops": drops.keys is not None}
    _launch(_norm_backward, (count,), tile, *tensors, len(x), block, *drops[1:], **constants)
    to_weight, to_shift, to_bias = _add_blocks(sums, weight).view(3, -1)
    return grad_x, to_bias, grad_residual, to_weight, to_shift


def drop(x: Tensor, drops: Drops) -> Tensor:
    """Computes dropout, or its backward pass, which is the same."""
    if drops.keys is None:
        return x.clone()
    out, tile = torch.empty_like(x), Tile.from_width(x.shape[1], COLUMNS)
    _launch_rows(_dropout, tile, x, drops.keys, out, len(x), *drops[1:])
    return out


def join_columns(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Lays the rows of three tensors side by side, and sums them over all rows, in the type of the bias."""
    rows, width = len(query), query[0].numel() if len(query) else bias.numel() // 3
    out, tile = query.new_empty(rows, 3 * width), Tile.from_width(width, COLUMNS)
    count, block = tile.blocks(rows, JOIN_BLOCKS)
    sums = query.new_empty(count, 3 * width, dtype=torch.float32)
    _launch(_join, (count, tile.parts, 3), tile, query, key, value, out, sums, rows, block)
    return out, _add_blocks(sums, bias)


def _add_blocks(sums: Tensor, like: Tensor) -> Tensor:
    """Adds up the sums of all blocks, in the type of a weight."""
    out, tile = like.new_empty(sums.shape[1]), Tile.from_width(sums.shape[1], SUM_COLUMNS)
    _launch(_sum_blocks, (tile.parts,), tile, sums, out, len(sums))
    return out


def _launch_rows(kernel: Any, tile: Tile, first: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launches a program for every tile of the first tensor."""
    _launch(kernel, (-(-len(first) // tile.rows), tile.parts), tile, first, *arguments, **constants)


def _launch(kernel: Any, grid: tuple[int, ...], tile: Tile, *arguments: Any, **constants: Any) -> None:
    if grid[0]:
        sizes = {"width": tile.width, "tile_rows": tile.rows, "tile_columns": tile.columns}
        kernel[grid](*arguments, **constants, **sizes, num_warps=tile.warps, num_stages=tile.stages)
