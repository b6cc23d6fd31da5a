"""The sizes of an encoder, and what follows from them: its parameters and the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

SIZES = {  # layers, hidden
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
VOCABULARY_MULTIPLE = 64
"""Rows of the word embeddings are padded to it: matrix products over odd sizes are slow. Never visible outside."""
DROPOUT = ("dropout", "attention_dropout")
"""Numbers of a shape that its weights do not depend on."""
NOT_IN_RECIPES = {
    "vocabulary": "pieces of the vocabulary",
    "next_sentence": "the head for next sentences",
}
"""What messages call the numbers of a shape that no recipe says; the others have their names there, `model.hidden`."""


@dataclass(frozen=True)
class Shape:
    """The numbers that make an encoder with its heads."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    """width of the feed-forward layers"""
    vocabulary: int
    """pieces of the vocabulary"""
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    epsilon: float = 1e-12
    """added to the variance in layer norms"""
    next_sentence: bool = True
    """whether there are a pooler and a head for next sentences, which data without pairs cannot train"""

    @classmethod
    def named(cls, size: str, vocabulary: int) -> Shape:
        """One of the published sizes."""
        layers, hidden = SIZES[size]
        return cls(layers, hidden, heads=hidden // 64, intermediate=4 * hidden, vocabulary=vocabulary)

    def differences(self, other: Shape) -> list[tuple[str, float, float]]:
        """Lists what keeps weights of this shape from a model of the other: the name that recipes have for a number,
        its value here and its value there."""
        names = [field.name for field in fields(self) if field.name not in DROPOUT]
        values = [
            (NOT_IN_RECIPES.get(name, f"model.{name}"), getattr(self, name), getattr(other, name)) for name in names
        ]
        return [(name, here, there) for name, here, there in values if here != there]

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def num_parameters(self) -> int:
        """With its heads; the padding of the vocabulary is not counted."""
        h, i = self.hidden, self.intermediate
        embeddings = (self.vocabulary + self.positions + self.segments) * h + 2 * h
        layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
        masked_head = h * h + h + 2 * h + self.vocabulary
        pooler_and_next_head = (h * h + h) + (2 * h + 2) if self.next_sentence else 0
        return embeddings + self.layers * layer + masked_head + pooler_and_next_head

    def flops(self, lengths: Sequence[int], predictions: int) -> float:
        """Useful operations of a training step (forward and backward) on sequences of these real lengths.

        Matrix products alone, a multiplication and an addition each, as everyone counts them: linear layers,
        attention over real pieces, and the heads on the positions that are predicted.
        """
        h, pieces = self.hidden, sum(lengths)
        linear = 2 * (4 * h * h + 2 * h * self.intermediate) * pieces
        attention = 4 * h * sum(length * length for length in lengths)
        masked_head = 2 * (h * h + h * self.vocabulary) * predictions
        next_head = 2 * (h * h + 2 * h) * len(lengths) if self.next_sentence else 0
        return 3.0 * (self.layers * (linear + attention) + masked_head + next_head)
