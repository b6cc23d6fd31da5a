"""Which documents are held out for validation."""

from __future__ import annotations

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.examples.streams import mix


def held_out(digests: Array, share: float, seed: int) -> Array:
    """The numbers of the documents for validation, from the digests of all documents.

    Those whose salted digests are smallest: copies of a text have one digest, so they are held out together and a text
    in validation is in no training example. At least one document, unless the share is 0 or there is no other.
    """
    count = min(max(1, round(len(digests) * share)) if share else 0, len(digests) - 1)
    if count < 1:
        return np.empty(0, np.int64)
    ranks = _ranks(digests, np.uint64(seed))
    chosen = ranks <= np.partition(ranks, count - 1)[count - 1]
    return np.flatnonzero(chosen) if not chosen.all() else np.empty(0, np.int64)


@compiled
def _ranks(digests, seed):
    """The digests in another order for each seed."""
    salt = mix(seed)
    ranks = np.empty(digests.size, np.uint64)
    for document in range(digests.size):
        ranks[document] = mix(digests[document] ^ salt)
    return ranks
