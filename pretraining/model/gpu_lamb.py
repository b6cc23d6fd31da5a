"""LAMB on a GPU, in Triton: three launches move a flat tensor, however many parameters it holds.

A stretch of a flat tensor has one trust ratio. It is cut into chunks, and a program computes one of them. The sums of
squares do not depend on the order in which programs run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretraining.model.gpu_tiles import CHUNK, Chunks

TILE = 1 << 9
"""The elements of a chunk that a program holds at a time: two for each of its threads, which takes 48 registers."""


class Factors(NamedTuple):
    """The numbers of a step that its weights share: floats, and tensors of one number on the device."""

    betas: tuple[float, float]
    epsilon: float
    decay: float
    corrects: bool
    """whether the averages are corrected for their start at zero"""
    steps: Tensor
    """fp32: this step's number, from 1"""
    scale: Tensor
    """fp32: the factor of gradients; if it is not finite, nothing moves"""
    rate: Tensor
    """fp32: the learning rate"""


@triton.jit(do_not_specialize=["log_1", "keep_1", "take_1", "log_2", "keep_2", "take_2", "epsilon", "decay"])
def _update(
    weights,
    gradients,
    first,
    second,
    places,
    squares,
    steps,
    scales,
    log_1,
    keep_1,
    take_1,
    log_2,
    keep_2,
    take_2,
    epsilon,
    decay,
    corrects: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
):
    """Moves the averages of a chunk, writes its updates over the gradients, and adds up its squares."""
    program = tl.program_id(0)
    at, length = tl.load(places + 3 * program), tl.load(places + 3 * program + 1)
    scale, step = tl.zeros([tile], tl.float32) + tl.load(scales), tl.load(steps).to(tl.float64)
    finite = scale - scale == 0.0
    correction_1, correction_2 = 1.0, 1.0
    if corrects:
        correction_1 = (1.0 - tl.exp(step * log_1)).to(tl.float32)
        correction_2 = (1.0 - tl.exp(step * log_2)).to(tl.float32)
    of_weights, of_updates = tl.zeros([tile], tl.float64), tl.zeros([tile], tl.float64)
    for begin in range(0, chunk, tile):
        inside = begin + tl.arange(0, tile) < length
        place = at + begin + tl.arange(0, tile)
        moves = inside & finite
        gradient = tl.load(gradients + place, mask=inside, other=0.0) * scale
        average = keep_1 * tl.load(first + place, mask=inside, other=0.0) + take_1 * gradient
        square = keep_2 * tl.load(second + place, mask=inside, other=0.0) + take_2 * gradient * gradient
        weight = tl.load(weights + place, mask=inside, other=0.0)
        update = average / correction_1 / (tl.sqrt_rn(square / correction_2) + epsilon) + decay * weight
        tl.store(first + place, average, mask=moves)
        tl.store(second + place, square, mask=moves)
        tl.store(gradients + place, update, mask=moves)
        weight, update = weight.to(tl.float64), tl.where(inside, update, 0.0).to(tl.float64)
        of_weights += weight * weight
        of_updates += update * update
    tl.store(squares + 2 * program, tl.sum(of_weights, 0))
    tl.store(squares + 2 * program + 1, tl.sum(of_updates, 0))


@triton.jit
def _add(squares, begins, sums):
    """Adds up the squares of the chunks of a slot, one after another."""
    slot = tl.program_id(0)
    of_weights, of_updates = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    for chunk in range(tl.load(begins + slot), tl.load(begins + slot + 1)):
        of_weights += tl.load(squares + 2 * chunk)
        of_updates += tl.load(squares + 2 * chunk + 1)
    tl.store(sums + 2 * slot, of_weights)
    tl.store(sums + 2 * slot + 1, of_updates)


@triton.jit
def _move(weights, updates, places, sums, scales, rates, adapts: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr):
    """Subtracts the updates of a chunk, times rate and trust ratio: 1 where one of the norms is 0."""
    program = tl.program_id(0)
    at, length = tl.load(places + 3 * program), tl.load(places + 3 * program + 1)
    slot = tl.load(places + 3 * program + 2)
    factor, scale = tl.load(rates), tl.zeros([tile], tl.float32) + tl.load(scales)
    finite = scale - scale == 0.0
    if adapts:
        of_weights, of_updates = tl.load(sums + 2 * slot), tl.load(sums + 2 * slot + 1)
        ratio = tl.where((of_weights > 0) & (of_updates > 0), tl.sqrt(of_weights / of_updates), 1.0)
        factor = factor * ratio.to(tl.float32)
    for begin in range(0, chunk, tile):
        place = at + begin + tl.arange(0, tile)
        moves = (begin + tl.arange(0, tile) < length) & finite
        weight = tl.load(weights + place, mask=moves, other=0.0)
        tl.store(weights + place, weight - factor * tl.load(updates + place, mask=moves, other=0.0), mask=moves)


def step(
    flats: Sequence[Sequence[Tensor]],
    chunks: Sequence[Chunks],
    factors: Factors,
    add_over_ranks: Callable[[Tensor], Tensor],
    adapts: bool,
) -> Tensor:
    """Makes one step of flat tensors, each given as weights, gradients, and both averages; overwrites the gradients by
    the updates. Weights move by trust ratios if it `adapts`. Returns the squares of weights and updates of all slots,
    (slots, 2), in fp64. Ranks add up the squares of their slots; with `same_bits`, those of all chunks, so that the
    order of addition does not depend on ranks."""
    sizes: dict[str, Any] = {"chunk": CHUNK, "tile": TILE, "num_warps": 8}
    numbers = [value for beta in factors.betas for value in (math.log(beta) if beta else -math.inf, beta, 1 - beta)]
    slots = [len(each.begins) - 1 for each in chunks]
    sums = flats[0][0].new_empty(sum(slots), 2, dtype=torch.float64)
    for each, cut, own in zip(flats, chunks, sums.split(slots), strict=True):
        squares = own.new_empty(len(cut.places), 2) if cut.total is None else own.new_zeros(cut.total, 2)
        if len(cut.places):
            given = (*each, cut.places, squares[cut.first :], factors.steps, factors.scale)
            given = (*given, *numbers, factors.epsilon, factors.decay)
            _update[(len(cut.places),)](*given, corrects=factors.corrects, **sizes)
        if adapts and cut.total is not None:
            squares = add_over_ranks(squares)
        _add[(len(own),)](squares, cut.begins, own, num_warps=1)
    sums = add_over_ranks(sums) if adapts and chunks[0].total is None else sums
    for each, cut, own in zip(flats, chunks, sums.split(slots), strict=True):
        if len(cut.places):
            given = (*each[:2], cut.places, own, factors.scale, factors.rate)
            _move[(len(cut.places),)](*given, adapts=adapts, **sizes)
    return sums
