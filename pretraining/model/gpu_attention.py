"""Attention over ragged sequences of at most 512 pieces on a GPU, in Triton.

Queries, keys and values are read where their joint product has written them, and their gradients are written side by
side. Forward, a program computes a tile of queries of a head of a sequence. Backward, a program computes a head of a
sequence, one tile of keys after another: the gradients of keys and values stay in registers, and those of queries are
complete after one tile of keys, or are added up in memory in fp32. Nobody else adds to them, so that the same input
gives the same bits. Of the forward pass, a number is kept for each row of scores.

Which shares are dropped depends on the key of the query's row, the site, and the numbers of the head and the key in
its sequence, by the hash of kernels/numbers.h: the masks are those of a CPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# compiled functions have the types of their first call

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretraining.model import gpu_kernels as kernels
from pretraining.model.gpu_kernels import _draw_columns, _hash_rows
from pretraining.model.gpu_tiles import Drops, Tile
from pretraining.model.layout import WHOLE

LOWEST = tl.constexpr(-1e30)
"""Lower than all scores; a finite number, from which scores that nobody sees are infinitely far."""
BEHIND = tl.constexpr(0x7FFFF000)
"""A place that is further away than any piece sees."""
Where = tuple[Tensor, int, int, int]
"""The starts of sequences, (s + 1,) int32; the most pieces of one; the number of the first sequences in which a piece
sees none behind itself; and the distance to which it sees."""


@triton.jit
def _read_sequence(starts, sequence, first, window):
    """Reads where a sequence begins and how long it is; returns also how far ahead its pieces see."""
    begin = tl.load(starts + sequence)
    return begin, tl.load(starts + sequence + 1) - begin, tl.where(sequence < first, 0, window)


@triton.jit
def _sees(row, column, length, window, ahead, whole: tl.constexpr):
    """Whether queries see keys: none that lies behind the sequence, and with `whole` all others."""
    if whole:
        seen = column < length
    else:
        away = tl.where(column < length, column, BEHIND) - row
        seen = (away >= -window) & (away <= ahead)
    return seen


@triton.jit(do_not_specialize=["pieces", "blocks", "first", "window", "first_head", "site", "threshold"])
def _attend(
    qkv,
    starts,
    keys,
    out,
    spreads,
    hashes,
    pieces,
    blocks,
    first,
    window,
    scale,
    first_head,
    site,
    threshold,
    scale_kept,
    drops: tl.constexpr,
    whole: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    number, heads = tl.program_id(0), width // size
    sequence, head, top = number // blocks // heads, number // blocks % heads, number % blocks * tile_rows
    begin, length, ahead = _read_sequence(starts, sequence, first, window)
    if top >= length:
        return
    qkv += begin.to(tl.int64) * (3 * width) + head * size
    lane, row = tl.arange(0, size)[None, :], top + tl.arange(0, tile_rows)
    within = tl.minimum(row, length - 1)[:, None]  # behind the sequence, its last row again
    query = tl.load(qkv + within * (3 * width) + lane)
    highest, total = tl.full([tile_rows], LOWEST, tl.float32), tl.zeros([tile_rows], tl.float32)
    context, known = tl.zeros([tile_rows, size], tl.float32), row < length
    if drops:
        hashed = _hash_rows(keys + begin, within, within < length, site)
        if head == 0:
            tl.store(hashes + begin + row[:, None], hashed, mask=known[:, None])
    left, right = tl.maximum(top - window, 0) // tile_columns * tile_columns, top + tile_rows + ahead
    for at in range(left, tl.minimum(right, length), tile_columns):
        column = at + tl.arange(0, tile_columns)
        place = tl.minimum(column, length - 1)[:, None] * (3 * width) + lane
        key, value = tl.load(qkv + width + place), tl.load(qkv + 2 * width + place)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(_sees(within, column[None, :], length, window, ahead, whole), scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        share, past = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total = total * past + tl.sum(share, 1)
        if drops:
            numbers = ((first_head + head) << 16) + column[None, :]
            share *= _draw_columns(hashed, numbers, threshold, scale_kept)
        context = context * past[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        highest = higher
    place = begin.to(tl.int64) + row
    tl.store(out + place[:, None] * width + head * size + lane, context / total[:, None], mask=known[:, None])
    tl.store(spreads + head.to(tl.int64) * pieces + place, highest + tl.log2(total), mask=known)


@triton.jit
def _multiply_turned(left, right):
    """Computes left.t() @ right. Triton divides all products of a kernel among warps by rows or by columns, as fits
    this one: those of wide heads would need too many registers by rows."""
    if right.shape[1] > 64:
        product = tl.dot(tl.trans(left), right, input_precision="ieee")
    else:
        product = tl.trans(tl.dot(tl.trans(right), left, input_precision="ieee"))
    return product


@triton.jit
def _read_tile(qkv, grad, out, spreads, rows, length, lane, width: tl.constexpr):
    """Reads what a tile of queries brings to all keys; returns also where it lies."""
    within = tl.minimum(rows, length - 1)[:, None]  # behind the sequence, its last row again
    there, joint = within * width + lane, within * (3 * width) + lane
    query, slope = tl.load(qkv + joint), tl.load(grad + there)
    inner = tl.sum(slope.to(tl.float32) * tl.load(out + there).to(tl.float32), 1)
    spread = tl.load(spreads + rows, mask=rows < length, other=float("inf"))  # with shares of 0 behind the sequence
    return there, joint, query, slope, inner[None, :], spread[None, :]


@triton.jit
def _find_slopes(key, value, query, slope, inner, spread, scale, seen, factor):
    """Computes what a tile of queries adds to the gradients of a tile of keys and of values, and the slopes of its
    scores, (keys, queries), with their sums for each key. `factor` is that of dropout."""
    scores = tl.dot(key, tl.trans(query), input_precision="ieee") * scale
    share = tl.where(seen, tl.exp2(scores - spread), 0.0)
    kept = share * factor
    slopes = tl.dot(value, tl.trans(slope), input_precision="ieee")
    slopes = kept * slopes - share * inner
    rounded = slopes.to(query.dtype)
    to_value = tl.dot(kept.to(slope.dtype), slope, input_precision="ieee")
    return tl.dot(rounded, query, input_precision="ieee"), to_value, rounded, tl.sum(slopes, 1)


@triton.jit
def _continue_sum(places, numbers, were_before, go_on):
    """Adds numbers to those that were stored before, and stores the sums that go on."""
    numbers += tl.load(places, mask=were_before, other=0.0)
    tl.store(places, numbers, mask=go_on)
    return numbers


@triton.jit
def _store_sum(places, rows, weights):
    """Stores the sum of rows with weights: by a product, which takes a tenth of the instructions of a reduction."""
    factors = tl.zeros([16, 1], tl.float32) + weights[None, :]  # the least rows of a product; the first is stored
    sums = tl.dot(factors.to(rows.dtype), rows, input_precision="ieee")
    tl.store(places + tl.zeros([16, 1], tl.int32), sums, mask=tl.arange(0, 16)[:, None] == 0)


@triton.jit
def _store_gradients(
    places, sums, key, grad_key, grad_value, total, present, lane, adds_up: tl.constexpr, width: tl.constexpr
):
    """Stores the gradients of a tile of keys and values; with `adds_up` also what they add to the bias's gradient."""
    to_keys, to_values, ones = grad_key.to(key.dtype), grad_value.to(key.dtype), tl.full(total.shape, 1.0, tl.float32)
    tl.store(places + width, to_keys, mask=present)
    tl.store(places + 2 * width, to_values, mask=present)
    if adds_up:
        _store_sum(sums + lane, key, total)
        _store_sum(sums + width + lane, to_keys, ones)
        _store_sum(sums + 2 * width + lane, to_values, ones)


@triton.jit(do_not_specialize=["pieces", "blocks", "first", "window", "first_head", "threshold"])
def _attend_backward(
    grad,
    qkv,
    starts,
    hashes,
    out,
    spreads,
    grad_qkv,
    halfway,
    sums,
    pieces,
    blocks,
    first,
    window,
    scale,
    slope_scale,
    first_head,
    threshold,
    scale_kept,
    drops: tl.constexpr,
    whole: tl.constexpr,
    halts: tl.constexpr,
    adds_up: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """Computes the gradients of one head of one sequence. With `halts`, `halfway` keeps the partial gradients of
    queries from one tile of keys to the next. With `adds_up`, each of the `blocks` tiles of keys writes its part of
    the bias's gradient to `sums`; tiles beyond the sequence write zeros."""
    sequence, head = tl.program_id(0) // (width // size), tl.program_id(0) % (width // size)
    begin, length, ahead = _read_sequence(starts, sequence, first, window)
    joint, single = begin.to(tl.int64) * (3 * width) + head * size, begin.to(tl.int64) * width + head * size
    qkv, grad_qkv, grad, out, halfway = qkv + joint, grad_qkv + joint, grad + single, out + single, halfway + single
    spreads += head.to(tl.int64) * pieces + begin
    if drops:
        hashes += begin
    if adds_up:
        sums += sequence.to(tl.int64) * blocks * (3 * width) + head * size
    lane = tl.arange(0, size)[None, :]
    for left in range(0, blocks * tile_columns, tile_columns):
        column = left + tl.arange(0, tile_columns)[:, None]
        place, number, present = column * (3 * width) + lane, ((first_head + head) << 16) + column, column < length
        key = tl.load(qkv + width + place, mask=present, other=0.0)
        value = tl.load(qkv + 2 * width + place, mask=present, other=0.0)
        grad_key, grad_value = tl.zeros([tile_columns, size], tl.float32), tl.zeros([tile_columns, size], tl.float32)
        total = tl.zeros([tile_columns], tl.float32)
        from_row, to_row = tl.maximum(left - ahead, 0) // tile_rows * tile_rows, left + tile_columns + window
        for top in range(from_row, tl.where(left < length, tl.minimum(to_row, length), 0), tile_rows):
            rows = top + tl.arange(0, tile_rows)
            row, known, factor = rows[None, :], rows[:, None] < length, 1.0
            at, joint_at, query, slope, inner, spread = _read_tile(qkv, grad, out, spreads, rows, length, lane, width)
            if drops:
                hashed = tl.load(hashes + row, mask=row < length, other=0)
                factor = _draw_columns(hashed.to(tl.uint32, bitcast=True), number, threshold, scale_kept)
            seen = _sees(row, column, length, window, ahead, whole)
            to_key, to_value, slopes, added = _find_slopes(key, value, query, slope, inner, spread, scale, seen, factor)
            grad_key, grad_value, grad_query = grad_key + to_key, grad_value + to_value, _multiply_turned(slopes, key)
            is_last = left + tile_columns >= tl.minimum(top + tile_rows + ahead, length)
            if halts:
                was_before = known & (left > tl.maximum(top - window, 0))
                grad_query = _continue_sum(halfway + at, grad_query, was_before, known & (is_last == 0))
            tl.store(grad_qkv + joint_at, grad_query * slope_scale, mask=known & is_last)
            if adds_up:
                total += added
        grad_key, total = grad_key * slope_scale, total * slope_scale
        _store_gradients(grad_qkv + place, sums, key, grad_key, grad_value, total, present, lane, adds_up, width)
        if adds_up:
            sums += 3 * width
        if halts:
            tl.debug_barrier()  # other threads may read what these have written


def choose_tile(width: int, size: int, longest: int, capability: tuple[int, int] | None = None) -> Tile:
    """Chooses how many queries and keys of heads of this size a program computes at once; backward for a `capability`.

    Backward, registers decide how many programs a multiprocessor holds. For sequences of up to 128 pieces, 16 queries
    and 64 keys need the fewest: heads of 64 at most 168 on 9.0, for three programs of 4 warps, and none spills. Longer
    sequences take 128 keys, since every tile of keys reads all queries and the sums of their gradients again.
    """
    if capability is None:
        return Tile(width, 64, 64, 4)
    if longest <= 128 and size < 128:
        return Tile(width, 16, 64, 4, 1)
    rows = 32 if size == 32 or (size == 64 and capability[0] == 9) else 16
    stages = 1 if size == 64 and rows == 16 else 3  # with more, this one spills on 8.0
    return Tile(width, rows, 64 if size == 128 else 128, 8, stages)


@functools.cache
def _find_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def attend_forward(
    qkv: Tensor, heads: int, where: Where, drops: Drops, first_head: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes attention, (n, hidden), from queries, keys and values, (n, 3 * hidden), that include their bias; and the
    logarithm of the sum of the weights of each row of scores, (heads, n), to the base 2; and the hashed keys of rows,
    if anything is dropped."""
    (starts, longest, first, window), (pieces, hidden) = where, (len(qkv), qkv.shape[1] // 3)
    tile, size = choose_tile(hidden, hidden // heads, longest), hidden // heads
    out, spreads = qkv.new_empty(pieces, hidden), qkv.new_empty(heads, pieces, dtype=torch.float32)
    hashes = None if drops.keys is None else torch.empty_like(drops.keys)
    blocks = -(-longest // tile.rows)
    sizes = (pieces, blocks, first, window, math.log2(math.e) * size**-0.5, first_head)
    tensors = (qkv, starts, drops.keys, out, spreads, hashes)
    constants = {"drops": hashes is not None, "whole": not first and window == WHOLE, "size": size}
    kernels._launch(_attend, ((len(starts) - 1) * heads * blocks,), tile, *tensors, *sizes, *drops[1:], **constants)
    return out, spreads, hashes


def attend_backward(
    heads: int,
    where: Where,
    drops: Drops,
    first_head: int,
    has_bias: bool,
    grad: Tensor,
    qkv: Tensor,
    out: Tensor,
    spreads: Tensor,
    hashes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of queries, keys and values, (n, 3 * hidden), and of their bias if there is one."""
    (starts, longest, first, window), (pieces, hidden) = where, out.shape
    size, count = hidden // heads, len(starts) - 1
    tile = choose_tile(hidden, size, longest, _find_capability(qkv.device))
    blocks, grad_qkv = -(-longest // tile.columns), torch.empty_like(qkv)
    halfway = qkv.new_empty(pieces, hidden, dtype=torch.float32) if blocks > 1 else spreads
    sums = qkv.new_empty(count * blocks, 3 * hidden, dtype=torch.float32) if has_bias else None
    tensors = (grad, qkv, starts, hashes, out, spreads, grad_qkv, halfway, sums)
    sizes = (pieces, blocks, first, window, math.log2(math.e) * size**-0.5, size**-0.5, first_head)
    constants = {"drops": hashes is not None, "whole": not first and window == WHOLE, "adds_up": has_bias}
    constants |= {"halts": blocks > 1}
    kernels._launch(_attend_backward, (count * heads,), tile, *tensors, *sizes, *drops[2:], size=size, **constants)
    return grad_qkv, None if sums is None else kernels._add_blocks(sums, qkv)
