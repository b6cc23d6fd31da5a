"""Dropout whose masks depend on neither ranks, devices nor the rest of the batch, where our kernels draw them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.common.arrays import Array
from data_prep.common.hashing import hash_key
from pretraining.model.cpu_kernels import Masks


@dataclass(frozen=True)
class Dropout:
    """The probability and the random keys of dropout at one place of the model.

    In our kernels a hash of (row key, site, column) decides. A row key stands for (seed, example, position), so a mask
    depends neither on ranks and devices nor on the rest of the batch. Elsewhere PyTorch's generator decides, as it does
    for the probabilities of attention on a GPU.
    """

    probability: float
    keys: Tensor
    """(n,) int32, a key for each row; empty where PyTorch's generator decides. (sites, n) after `make_compilable`"""
    site: int = 0
    columns: Tensor | None = None
    """(width,) int32, a key for each column, where PyTorch's operations draw the masks: row keys include the site"""
    first_head: int = 0
    """the number among all heads of the first that this rank computes, for the probabilities of attention"""

    @property
    def drops(self) -> bool:
        """Whether our kernels drop anything: they compare 32 bits, so not for a smaller probability."""
        return int(self.probability * 2**32) > 0

    def select_site(self, site: int) -> Dropout:
        """Selects a place of the model, which has masks of its own. Keys that include the site are copied:
        torch.compile would recompile a layer for another view."""
        return replace(self, site=site, keys=self.keys if self.columns is None else self.keys[site].clone())

    def select_rows(self, rows: Tensor) -> Dropout:
        """Selects the keys of some rows."""
        return replace(self, keys=self.keys[..., rows]) if len(self.keys) else self

    def add_spare_rows(self, rows: int) -> Dropout:
        """Adds keys for `rows` more rows, which belong to no piece."""
        return replace(self, keys=F.pad(self.keys, (0, rows))) if len(self.keys) else self

    def make_compilable(self, sites: int, width: int) -> Dropout:
        """Prepares the masks of our kernels at `sites` places of the model for layers under torch.compile.

        Inductor's own masks repeat in torch 2.13. The site is part of the keys: as a number of its own it would make
        torch.compile recompile each layer.
        """
        if not (len(self.keys) and self.probability):
            return self
        steps = torch.arange(max(sites, width), dtype=torch.int32, device=self.keys.device)
        keys = _scramble(self.keys ^ _scramble(steps[:sites] + HASH_STEP)[:, None])
        return replace(self, keys=keys, columns=steps[:width] * HASH_STEP)

    @property
    def for_kernels(self) -> Masks:
        return self.keys, self.site + (self.first_head << 32), float(self.probability)


HASH_STEP = 0x9E3779B9 - 2**32


def _scramble(x: Tensor) -> Tensor:
    """Hashes int32 as kernels/numbers.h does."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def drop_by_torch(x: Tensor, dropout: Dropout) -> Tensor:
    """Dropout by PyTorch's operations."""
    if dropout.columns is None:
        return F.dropout(x, dropout.probability) if dropout.probability else x
    threshold = int(dropout.probability * 2**32)
    hashed = _scramble(dropout.columns + dropout.keys[:, None])
    drops = (hashed ^ -(2**31)) < threshold - 2**31  # the order of unsigned numbers
    return torch.where(drops, 0.0, x * (1 / (1 - threshold / 2**32)))


def make_row_keys(dropout_seed: int, examples: Array, positions: Array, lengths: Array) -> Tensor:
    """Makes a key for every piece, from the seed of the step, the example and the position."""
    pieces = hash_key(np.repeat(hash_key(dropout_seed, *examples.T), lengths), positions)
    return torch.from_numpy(pieces.astype(np.uint32).view(np.int32))
