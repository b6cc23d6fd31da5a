"""How the kernels of a GPU cut their work, tiles and blocks of rows, and what dropout drops, as they need it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

COLUMNS, SUM_COLUMNS = 256, 32
"""of rows that need not be seen as a whole"""
GELU_BLOCKS, JOIN_BLOCKS, NORM_BLOCKS = 66, 128, 640
"""Blocks of rows that sums are taken by, at most: they keep a GPU busy, and their sums are small beside the rows. Of
some that were measured on an H200 for large, these and the sizes of tiles are about the fastest."""
LEAST_BLOCK = 32
"""Rows of a block, at least."""


class Tile(NamedTuple):
    """The part of a tensor's rows that a program holds at a time."""

    width: int
    """of the rows"""
    rows: int
    columns: int
    warps: int

    @classmethod
    @functools.cache
    def for_width(cls, width: int, most: int | None = None, elements: int = 2048, each: int = 8) -> Tile:
        """Of whole rows, or of so many columns at most; of about so many elements, of which each thread has so many."""
        columns = 1 << ((width if most is None else min(width, most)) - 1).bit_length()
        rows = max(1, elements // columns)
        return cls(width, rows, columns, min(max(rows * columns // (32 * each), 1), 32))

    @classmethod
    def of_gelu(cls, width: int) -> Tile:
        """Of GELU, forward and backward."""
        return cls.for_width(width, COLUMNS, 4096, 16)

    @classmethod
    def of_norm(cls, width: int, backward: bool = False) -> Tile:
        """Of a norm; backward it has more numbers for each element."""
        return cls.for_width(width, None, 1024, 8 if backward else 16)

    @property
    def parts(self) -> int:
        """How many tiles a row goes through."""
        return -(-self.width // self.columns)

    def blocks(self, rows: int, most: int) -> tuple[int, int]:
        """Into how many blocks of rows a sum is divided, and of how many rows: this follows from their number alone."""
        least = max(-(-rows // most), LEAST_BLOCK)
        block = -(-least // self.rows) * self.rows
        return -(-rows // block), block


class Drops(NamedTuple):
    """What is dropped, as kernels need it."""

    keys: Tensor | None
    """(n,) int32, for each row; None where nothing is dropped"""
    site: int
    """scrambled, as an int32"""
    threshold: int
    """a hash below it drops, as an int32"""
    scale: float
    """of what is kept"""

    @classmethod
    def from_keys(cls, keys: Tensor, site: int, probability: float) -> Drops:
        numbers = _drop_numbers(site, probability)
        return cls(keys if numbers[1] else None, *numbers)


@functools.cache
def _drop_numbers(site: int, probability: float) -> tuple[int, int, float]:
    """The site, the threshold and the scale of `Drops`."""
    threshold = int(probability * 2**32)
    if not threshold:
        return 0, 0, 1.0
    return _signed(_scrambled_number(site + 0x9E3779B9)), _signed(threshold), 1 / (1 - probability)


def _scrambled_number(number: int) -> int:
    """What `_scrambled` makes of one number."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x7FEB352D & 0xFFFFFFFF
    number = (number ^ number >> 15) * 0x846CA68B & 0xFFFFFFFF
    return number ^ number >> 16


def _signed(number: int) -> int:
    """The int32 of the same bits: Triton would take a number for an int64 where it needs all 32."""
    return number - (number >> 31 << 32)
