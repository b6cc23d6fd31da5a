"""Computes the keys of dropout on the GPU, in Triton: the same as `dropout.make_row_keys`."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.hashing import FACTOR_1, FACTOR_2, GOLDEN, hash_key

STEP_64, FACTOR_64_1, FACTOR_64_2 = tl.constexpr(GOLDEN), tl.constexpr(FACTOR_1), tl.constexpr(FACTOR_2)
PIECES = 256
"""The pieces of a sequence whose keys a program computes."""


@triton.jit
def _row_keys(sequences, starts, positions, keys, tile: tl.constexpr):
    """Computes the second half of `hash_key`: hashes a sequence's key with the position of a piece."""
    sequence = tl.program_id(0)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    piece = begin + tl.program_id(1) * tile + tl.arange(0, tile)
    key = tl.load(sequences + sequence).to(tl.uint64, bitcast=True)
    key = (key ^ tl.load(positions + piece, mask=piece < end, other=0).to(tl.uint64)) + STEP_64
    key = (key ^ (key >> 30)) * FACTOR_64_1
    key = (key ^ (key >> 27)) * FACTOR_64_2
    key = key ^ (key >> 31)
    tl.store(keys + piece, key.to(tl.uint32).to(tl.int32, bitcast=True), mask=piece < end)


def make_row_keys(sequences: Array, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Computes the key of every piece, (n,) int32, from the key of its sequence, (s,) uint64, and its position.

    The host neither waits for the device nor computes anything per piece.
    """
    keys = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
    halves = torch.from_numpy(hash_key(sequences).view(np.int64))
    if positions.is_cuda:
        halves = halves.pin_memory().to(positions.device, non_blocking=True)
    grid = (len(sequences), -(-longest // PIECES))
    _row_keys[grid](halves, starts, positions, keys, tile=PIECES, num_warps=4)
    return keys
