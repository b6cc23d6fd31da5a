"""Holds out rows of a training file as a dev split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError


def choose_held_out(place: Path, texts: Iterable[str], share: float, what: str) -> tuple[Array, str]:
    """Marks the texts of a file that are held out, at least one and not all, and returns a note that calls them `what`.

    The choice depends on hashes of the texts, not on their order: equal texts stay together, and added texts move few.
    """
    digests = (hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest() for text in texts)
    keys = np.frombuffer(b"".join(digests), ">u8")
    if len(keys) < 2:
        raise UserError(f"{place}: one row alone, of which none can be held out to be scored; add rows, or a dev split")
    held = min(max(1, round(share * len(keys))), len(keys) - 1)
    order = np.argsort(keys, kind="stable")
    chosen: Array = keys <= keys[order[held - 1]]  # equal texts stay together
    if chosen.all():
        chosen[order[held:]] = False
    note = f"{place}: {chosen.sum():,} of its {len(keys):,} {what} are held out from training and scored"
    return chosen, note
