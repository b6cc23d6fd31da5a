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
    """(n,) int32, a key for each row; empty where PyTorch's generator decides"""
    site: int = 0
    first_head: int = 0
    """the number among all heads of the first that this rank computes, for the probabilities of attention"""

    @property
    def drops(self) -> bool:
        """Whether our kernels drop anything: they compare 32 bits, so not for a smaller probability."""
        return int(self.probability * 2**32) > 0

    def select_site(self, site: int) -> Dropout:
        """Selects a place of the model, which has masks of its own."""
        return replace(self, site=site)

    def select_rows(self, rows: Tensor) -> Dropout:
        """Selects the keys of some rows."""
        return replace(self, keys=self.keys[rows]) if len(self.keys) else self

    def add_spare_rows(self, rows: int) -> Dropout:
        """Adds keys for `rows` more rows, which belong to no piece."""
        return replace(self, keys=F.pad(self.keys, (0, rows))) if len(self.keys) else self

    @property
    def for_kernels(self) -> Masks:
        return self.keys, self.site + (self.first_head << 32), float(self.probability)


KEEPS = Dropout(0.0, torch.empty(0, dtype=torch.int32))
"""Drops nothing."""


def make_row_keys(dropout_seed: int, examples: Array, positions: Array, lengths: Array) -> Tensor:
    """Makes a key for every piece, from the seed of the step, the example and the position."""
    pieces = hash_key(np.repeat(hash_key(dropout_seed, *examples.T), lengths), positions)
    return torch.from_numpy(pieces.astype(np.uint32).view(np.int32))
