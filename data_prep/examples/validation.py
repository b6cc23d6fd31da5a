"""Holds documents out for validation, so that a model is measured on text that it was not trained on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.examples.streams import mix
from data_prep.shards import WORK

HELD_OUT = f"{WORK}/held-out.npy"  # the numbers of the documents held out


class Members(NamedTuple):
    """The numbers of the documents for training, and of those held out for validation."""

    training: Array
    validation: Array


def choose_held_out(digests: Array, share: float, seed: int) -> Array:
    """Chooses the documents for validation by the digests of all documents; returns their numbers.

    They are those whose salted digests are smallest: copies of a text have one digest, so they are held out together
    and a text in validation is in no training example. There is at least one, unless the share is 0 or there is no
    other document.
    """
    count = min(max(1, round(len(digests) * share)) if share else 0, len(digests) - 1)
    if count < 1:
        return np.empty(0, np.int64)
    ranks = _ranks(digests, np.uint64(seed))
    chosen = ranks <= np.partition(ranks, count - 1)[count - 1]
    return np.flatnonzero(chosen) if not chosen.all() else np.empty(0, np.int64)


@compiled
def _ranks(digests, seed):
    """Puts the digests in another order for every seed."""
    salt = mix(seed)
    ranks = np.empty(digests.size, np.uint64)
    for document in range(digests.size):
        ranks[document] = mix(digests[document] ^ salt)
    return ranks


@functools.lru_cache(maxsize=1)
def read_members(folder: Path, num_documents: int, sha256: str) -> Members:
    """Reads which documents are held out, once for all tasks of a worker; another checksum means another file."""
    held_out = np.load(folder / HELD_OUT)
    return Members(np.delete(np.arange(num_documents, dtype=np.uint32), held_out), held_out.astype(np.uint32))
