"""Tiles and blocks of rows of the GPU kernels, and the arguments that they take for dropout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS, SUM_COLUMNS = 256, 32
"""The columns of a tile, for operations that do not need whole rows; the second is for sums over blocks."""
GELU_BLOCKS, JOIN_BLOCKS, NORM_BLOCKS = 66, 128, 640
"""The most blocks of rows of a sum: enough to keep a GPU busy, and few beside the rows. Among the values measured on
an H200 for large, these and the sizes of tiles are about the fastest."""
LEAST_BLOCK = 32
"""The least rows of a block."""


CHUNK = 1 << 15
"""The most elements of a flat tensor that a program of an optimizer moves."""


class Tile(NamedTuple):
    """The part of a tensor's rows that a program holds at a time."""

    width: int
    """the width of a whole row"""
    rows: int
    columns: int
    warps: int
    stages: int = 3
    """stages of the loop's pipeline: how many iterations ahead it loads"""

    @classmethod
    @functools.cache
    def from_width(cls, width: int, most: int | None = None, elements: int = 2048, each: int = 8) -> Tile:
        """Makes a tile of whole rows, or of at most `most` columns, with about `elements` elements, `each` per
        thread."""
        columns = 1 << ((width if most is None else min(width, most)) - 1).bit_length()
        rows = max(1, elements // columns)
        return cls(width, rows, columns, min(max(rows * columns // (32 * each), 1), 32))

    @classmethod
    @functools.cache
    def from_gelu_width(cls, width: int) -> Tile:
        """Makes the tile of GELU, forward and backward."""
        return cls.from_width(width, COLUMNS, 4096, 16)

    @classmethod
    @functools.cache
    def from_norm_width(cls, width: int, backward: bool = False) -> Tile:
        """Makes the tile of a norm; backward, a thread takes fewer elements, since each needs more registers."""
        return cls.from_width(width, None, 1024, 8 if backward else 16)

    @property
    @functools.cache  # noqa: B019 - there are few tiles
    def parts(self) -> int:
        """The number of tiles in a row."""
        return -(-self.width // self.columns)

    @functools.lru_cache  # noqa: B019
    def blocks(self, rows: int, most: int) -> tuple[int, int]:
        """The number of blocks of a sum over rows, and the rows of each: they follow from the number of rows alone."""
        least = max(-(-rows // most), LEAST_BLOCK)
        block = -(-least // self.rows) * self.rows
        return -(-rows // block), block


class Chunks(NamedTuple):
    """The chunks of a flat tensor's stretches, on its device, in the order of their slots."""

    places: Tensor
    """(chunks, 3) int64: first element, number of elements, slot"""
    begins: Tensor
    """(slots + 1,) int64: the first chunk of each slot"""
    first: int = 0
    """the number of the first chunk among those of all ranks"""
    total: int | None = None
    """the chunks of all ranks, where `begins` counts these; None where each rank adds up its own"""

    @classmethod
    def from_stretches(
        cls, stretches: Sequence[Sequence[int]], slots: Sequence[int], count: int, device: torch.device
    ) -> Chunks:
        """Cuts stretches, of which each begins with its first element and its length, and has a slot; slots rise."""
        rows = [
            (offset + begin, min(CHUNK, length - begin), slot)
            for (offset, length, *_), slot in zip(stretches, slots, strict=True)
            for begin in range(0, length, CHUNK)
        ]
        places = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        begins = torch.searchsorted(places[:, 2].contiguous(), torch.arange(count + 1))
        return cls(places.to(device), begins.to(device))

    def among_all(self, rows: Sequence[int], counts: Sequence[int]) -> Chunks:
        """Returns these chunks as some of those of all ranks: their numbers among these, which are consecutive, and how
        many each slot has."""
        begins = torch.tensor([0, *counts]).cumsum(0)
        return Chunks(self.places, begins.to(self.begins.device), rows[0] if rows else 0, sum(counts))


class Drops(NamedTuple):
    """The arguments of the kernels for dropout."""

    keys: Tensor | None
    """(n,) int32, for each row; None where nothing is dropped"""
    site: int
    """the hashed site, as an int32"""
    threshold: int
    """an element whose hash is below it is dropped; as an int32"""
    scale: float
    """the factor of elements that are kept"""

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
    return _signed(_scramble(site + 0x9E3779B9)), _signed(threshold), 1 / (1 - probability)


def _scramble(number: int) -> int:
    """Hashes a number as `gpu_kernels._scramble` does."""
    number &= 0xFFFFFFFF
    number = (number ^ number >> 16) * 0x7FEB352D & 0xFFFFFFFF
    number = (number ^ number >> 15) * 0x846CA68B & 0xFFFFFFFF
    return number ^ number >> 16


def _signed(number: int) -> int:
    """Returns the int32 of the same bits: Triton takes a number that needs all 32 bits for an int64."""
    return number - (number >> 31 << 32)
