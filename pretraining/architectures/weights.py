"""The declaration of a weight: its role, how a mesh cuts it, and its counterparts in transformers; and the heads of
tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pretraining.mesh.cuts import Cut, Division
from pretraining.model.shape import BIAS, MATRIX, NORM, TABLE, Role, Shape

Rows = Literal["pieces", "positions", "segments"]
"""The things that have a row each in a table of embeddings; another model may have more of them."""
Kind = Literal["classes", "labels", "score", "choice", "spans", "tags", "embeddings"]
"""One class of several, several labels at once, a number, one of several texts, a stretch of the text, a tag a word;
the vector of a text."""
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "embeddings")
"""The kinds with a linear layer on the encoder: all but vectors."""


@dataclass(frozen=True)
class Weight:
    """A weight of ours, with its role and its counterparts in transformers."""

    ours: str
    theirs: tuple[str, ...]
    """names in transformers; if several, our weight is their rows in order"""
    size: tuple[int, ...]
    """the size of our weight without padding"""
    role: Role
    cut: Cut = "whole"
    rows: Rows | None = None
    """the things that it has a row for each of"""
    before: int = 0
    """rows that transformers has besides, before ours, which nothing reads"""
    transposed: bool = False
    """whether transformers stores a matrix with its inputs first"""

    @property
    def part(self) -> tuple[int, ...]:
        """The size of each weight of transformers."""
        size = (self.before + self.size[0] // len(self.theirs), *self.size[1:])
        return size[::-1] if self.transposed else size

    @property
    def division(self) -> Division:
        """The way in which ranks that share a model divide it."""
        return Division(self.cut, self.role.parts)

    def pad_size(self, shape: Shape) -> tuple[int, ...]:
        """Computes the size of our weight in the model, with padding."""
        return (shape.padded_vocabulary if self.rows == "pieces" else self.size[0], *self.size[1:])


def declare_linear(
    ours: str,
    theirs: Sequence[str],
    rows: int,
    columns: int,
    role: Role = MATRIX,
    cut: Cut = "whole",
    transposed: bool = False,
) -> list[Weight]:
    """Declares the weight and the bias of a linear layer; transformers may have several in its place."""
    weights, biases = (tuple(f"{name}.{kind}" for name in theirs) for kind in ("weight", "bias"))
    cut_of_bias = cut if cut == "columns" else "whole"
    return [
        Weight(f"{ours}.weight", weights, (rows, columns), role, cut, transposed=transposed),
        Weight(f"{ours}.bias", biases, (rows,), BIAS._replace(parts=role.parts), cut_of_bias),
    ]


def declare_table(ours: str, theirs: str, count: int, width: int, rows: Rows) -> Weight:
    """Declares a table of embeddings, with a row for each of its things."""
    cut: Cut = "vocabulary" if rows == "pieces" else "whole"
    return Weight(f"{ours}.weight", (f"{theirs}.weight",), (count, width), TABLE, cut, rows)


def declare_norm(ours: str, theirs: str, width: int) -> list[Weight]:
    """Declares the weight and the bias of a layer norm."""
    return [
        Weight(f"{ours}.weight", (f"{theirs}.weight",), (width,), NORM),
        Weight(f"{ours}.bias", (f"{theirs}.bias",), (width,), BIAS),
    ]


def count_parameters(weights: Iterable[Weight]) -> int:
    """Counts the numbers in weights, without the padding of the vocabulary."""
    return sum(math.prod(weight.size) for weight in weights)


def count_products(weights: Iterable[Weight]) -> int:
    """Counts the multiplications and additions of a row with these matrices."""
    return sum(2 * math.prod(weight.size) for weight in weights if len(weight.size) > 1)


@dataclass(frozen=True)
class TaskHead:
    """The head of a task: a linear layer on hidden states, with the names of its outputs."""

    kind: Kind
    labels: tuple[str, ...] = ()
    """Names of classes, labels or tags, in the order of the outputs; empty for other kinds."""
    averages: bool = False
    """Whether it reads the mean of a sequence's pieces in place of the piece that stands for it."""

    @property
    def outputs(self) -> int:
        """Number of outputs for a sequence, for a text to choose, or for a piece."""
        return {"score": 1, "choice": 1, "spans": 2}.get(self.kind, len(self.labels))

    @property
    def has_pooler(self) -> bool:
        """Whether it reads one vector of a sequence; otherwise it reads those of pieces."""
        return self.kind not in ("spans", "tags", "embeddings")
