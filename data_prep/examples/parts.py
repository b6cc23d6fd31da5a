"""The parts of a corpus: its files of token documents, and among which of them a document finds its partners.

The documents are numbered through all parts. A partner may be any document where there are at most FEW_PARTS parts.
Where there are more, NEIGHBOURS parts that follow each other share PARTNER_PARTS drawn for them, each as likely as it
has many documents, and a partner is any document of one of these. So every document is as likely a partner as before,
and what a worker opens and reads for its partners does not grow with the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.examples.streams import begin_stream, draw_below
from data_prep.shards import WORK
from data_prep.vocabulary.tokens import TokenFiles

PARTS = f"{WORK}/parts.arrow"
HELD_OUT = f"{WORK}/held-out.npy"  # the numbers of the documents held out, ascending
FEW_PARTS = 256  # up to this number of parts, a partner may be in any part
PARTNER_PARTS = 64  # parts to draw partners from, if there are more: half a million documents of Wikipedia
NEIGHBOURS = 256  # parts that draw from the same ones, which the machine then has in memory
TRAINING, VALIDATION = 0, 1


class Pool(NamedTuple):
    """The documents among which partners are drawn: those for training, or those held out for validation.

    They are ranked by their numbers, and drawn by their ranks: a range of ranks is drawn first where there are several.
    """

    firsts: Array
    """The first rank of every range."""
    sizes: Array
    """How many ranks every range has."""
    held_out: Array
    """The numbers of the documents held out, ascending."""
    training: bool


@dataclass(frozen=True)
class Parts(TokenFiles):
    """All files of token documents, and which of the documents are held out."""

    held_out: Array

    def validation_rows(self, part: int) -> Array:
        """Finds the rows of a part that are held out."""
        first, end = self.firsts[part], self.firsts[part + 1]
        low, high = np.searchsorted(self.held_out, [first, end])
        return np.asarray(self.held_out[low:high] - first, np.int64)

    def neighbours(self, part: int) -> int:
        """Returns the number of the group of parts that share their partners: 0 for all, if parts are few."""
        return part // NEIGHBOURS if len(self.paths) > FEW_PARTS else 0

    def pool(self, part: int, seed: int, validation: bool) -> Pool:
        """Finds the documents among which the partners of a part are drawn: all where parts are few, or some parts."""
        before = np.searchsorted(self.held_out, self.firsts)  # documents held out that are before each part
        ranks = np.asarray(before if validation else self.firsts - before, np.int64)
        if len(self.paths) <= FEW_PARTS:
            firsts, sizes = np.zeros(1, np.int64), ranks[-1:]
        else:
            state = begin_stream(seed, 0, VALIDATION if validation else TRAINING, self.neighbours(part))
            drawn = np.array([draw_below(state, ranks[-1]) for _ in range(PARTNER_PARTS if ranks[-1] else 0)], np.int64)
            chosen = np.searchsorted(ranks, drawn, side="right") - 1
            firsts, sizes = ranks[chosen], np.diff(ranks)[chosen]
        return Pool(firsts, sizes, self.held_out, not validation)


def read_parts(folder: Path) -> Parts:
    """Maps the parts into memory."""
    return Parts.read(folder / PARTS, np.asarray(np.load(folder / HELD_OUT, mmap_mode="r")))
