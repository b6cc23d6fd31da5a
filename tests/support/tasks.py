"""What tests of fine-tuning tasks share: a small vocabulary, items as text, and logits that say something."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
import pytest

from data_prep.common.arrays import Array
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece
from finetuning.inputs import Cutter, Items, Ragged

_CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation
VOCABULARY = WordPiece((*SPECIAL, *_CHARACTERS, *(f"##{character}" for character in _CHARACTERS)), cased=False)
"""Pieces of one character."""
pytest.importorskip("numba", reason="numba is not installed, which cuts texts into pieces")
CUTTER = Cutter(VOCABULARY)


def laid_out(items: Items, number: int) -> list[str]:
    """The sequences of an item as text: `[CLS] a b [SEP]`, with its words whole."""
    sequences = items.encode(np.array([number])).sequences.pieces
    rows = [sequences.row(row) for row in range(len(sequences))]
    return [" ".join(VOCABULARY.pieces[piece] for piece in row).replace(" ##", "") for row in rows]


def labels(items: Items) -> list[float]:
    """What is to be said of the items, whose labels are single ones."""
    found = items.encode(np.arange(len(items))).labels
    assert found is not None
    return [float(label) for label in found.values]


def saying(classes: Sequence[int], outputs: int) -> Ragged:
    """Logits of a model that says these classes."""
    return rows(np.eye(outputs, dtype=np.float32)[list(classes)])


def rows(logits: Sequence[Sequence[float]] | Array) -> Ragged:
    """Logits of items, a row each."""
    values = np.array(logits, np.float32)
    return Ragged(values, np.arange(1, len(values) + 1))
