"""Items of every kind of task, of several lengths, as a model takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.transformers_models import SHAPE

from finetuning.inputs import Encoded, Ragged, Sequences
from finetuning.model.heads import TaskBatch
from finetuning.running.batches import pack
from pretraining.architectures.weights import Kind, TaskHead

LENGTHS = [6, 2, 9, 4]
"""Pieces of the items."""
CHOICES = 2
NAMES = ("a", "b", "c")


def head_of(kind: Kind) -> TaskHead:
    """A head of this kind."""
    return TaskHead(kind, NAMES if kind in ("classes", "labels", "tags") else ())


def items_of(kind: Kind, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> Encoded:
    """An item of every length, with a label."""
    choices, items = CHOICES if kind == "choice" else 1, len(lengths)
    random = np.random.default_rng(seed)
    pieces = Ragged.from_rows(
        [random.integers(1, SHAPE.vocabulary, length).astype(np.int32) for length in np.repeat(lengths, choices)]
    )
    words = Ragged.from_rows([np.arange(length - 1) for length in lengths])
    labels = {
        "score": Ragged.from_table(random.normal(size=(items, 1)).astype(np.float32)),
        "labels": Ragged.from_table(random.integers(0, 2, (items, 3))),
        "spans": Ragged.from_table(np.tile([0, 1], (items, 1))),
        "tags": Ragged(random.integers(0, 3, len(words.values)), words.ends),
    }.get(kind, Ragged.from_table(random.integers(0, 2, (items, 1))))
    return Encoded(Sequences(pieces, pieces.lengths), labels, words if kind == "tags" else None, choices)


def batch_of(kind: str, lengths: tuple[int, ...]) -> TaskBatch:
    """Sequences of these lengths without labels: of tags every second piece begins a word, a choice has three."""
    random = np.random.default_rng(0)
    pieces = Ragged.from_rows([random.integers(1, SHAPE.vocabulary, length).astype(np.int32) for length in lengths])
    words = Ragged.from_rows([np.arange(0, length, 2) for length in lengths])
    sequences = Sequences(pieces, np.array(lengths) // 2 + 1)
    encoded = Encoded(sequences, None, words if kind == "tags" else None, 3 if kind == "choice" else 1)
    return pack(encoded, np.arange(len(encoded)))
