"""The sizes of an encoder, the number of its parameters, and its arithmetic operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

SIZES = {  # layers, hidden
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
VOCABULARY_MULTIPLE = 64
"""The rows of the word embeddings are padded to a multiple of this, since products over odd sizes are slow; exports are
not padded."""
DROPOUT = ("dropout", "attention_dropout")
"""The fields of a shape that weights do not depend on."""
PIECE_HEAD = "masked_head"
"""The name of the head that predicts pieces, in models and in stored weights."""
OBJECTIVE = "mlm"
"""The default objective."""
Sees = Literal["both", "before", "after"]
"""Which pieces a piece sees besides itself: all of its sequence, those before it, or those after it."""


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder and the heads that it has."""

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
    objective: str = OBJECTIVE
    """the objective of pre-training, which decides its heads"""
    pairs: bool = True
    """whether it has the heads that only pairs of segments train"""
    sees: Sees = "both"
    """which pieces a piece sees besides itself. A piece that sees all of a sequence stands for it: the last one for
    "before", otherwise the first"""

    @classmethod
    def from_size(cls, size: str, vocabulary: int) -> Shape:
        """Makes one of the published sizes."""
        layers, hidden = SIZES[size]
        return cls(layers, hidden, heads=hidden // 64, intermediate=4 * hidden, vocabulary=vocabulary)

    @property
    def encoder(self) -> Shape:
        """The shape of the encoder without heads, whatever its objective was."""
        return replace(self, objective=OBJECTIVE, pairs=False)

    def differences(self, other: Shape) -> list[tuple[str, Any, Any]]:
        """Lists the fields that differ between two shapes and decide whether weights fit: name, value here, value
        there."""
        names = [field.name for field in fields(self) if field.name not in DROPOUT]
        values = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [(name, here, there) for name, here, there in values if here != there]

    @property
    def one_way(self) -> bool:
        """Whether a piece sees only itself and the pieces on one side of it."""
        return self.sees != "both"

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def encoder_parameters(self) -> int:
        """The number of parameters without heads and without the padding of the vocabulary."""
        h, i = self.hidden, self.intermediate
        embeddings = (self.vocabulary + self.positions + self.segments) * h + 2 * h
        layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
        return embeddings + self.layers * layer

    def count_encoder_flops(self, lengths: Sequence[int]) -> float:
        """Counts the useful operations of the layers, forward: linear layers, and attention over the pieces that are
        seen."""
        h = self.hidden
        linear = 2 * (4 * h * h + 2 * h * self.intermediate) * sum(lengths)
        seen = sum(length * (length + 1) / 2 if self.one_way else length * length for length in lengths)
        return self.layers * (linear + 4 * h * seen)
