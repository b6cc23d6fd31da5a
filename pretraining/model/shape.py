"""The sizes of an encoder, what it learns by, and the roles of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

VOCABULARY_MULTIPLE = 64
"""The rows of the word embeddings are padded to a multiple of this, since products over odd sizes are slow; exports are
not padded."""
DROPOUT = ("dropout", "attention_dropout")
"""The fields of a shape that weights do not depend on."""
PIECE_HEAD = "masked_head"
"""The name of the head that predicts pieces, in models and in stored weights."""
DETECTION_HEAD = "detection_head"
"""Likewise of the head that finds replaced pieces."""
ARCHITECTURE, OBJECTIVE = "bert", "mlm"
"""The default architecture and objective."""
INITIAL_RANGE = 0.02
"""The standard deviation of initial values."""
OF_OBJECTIVE = "objective."
"""Begins the names of settings of the objective among stored values."""
Sees = Literal["both", "before", "after"]
"""Which pieces a piece sees besides itself: all of its sequence, those before it, or those after it."""
SIDES: dict[Sees, str] = {"both": "all others", "before": "those before it", "after": "those after it"}
"""How messages name the pieces that a piece attends to."""


@dataclass(frozen=True)
class Learning:
    """What a model learns by, which decides its heads and the direction of its attention."""

    objective: str = OBJECTIVE
    """the objective of pre-training"""
    pairs: bool = True
    """whether it has the heads that only pairs of segments train"""
    sees: Sees = "both"
    """which pieces a piece sees besides itself. A piece that sees all of a sequence stands for it: the last one for
    "before", otherwise the first"""
    settings: tuple[tuple[str, Any], ...] = ()
    """settings of the objective that its heads and losses depend on, by name"""

    @property
    def causal_share(self) -> float:
        """The share of the sequences in which a piece sees only those before it all the same; objectives that learn
        both have it."""
        return float(dict(self.settings).get("causal_share", 0.0))


@dataclass(frozen=True)
class Shape:
    """The architecture and the sizes of an encoder, and what it learns by. Architectures with sizes of their own derive
    from it."""

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
    architecture: str = ARCHITECTURE
    learns: Learning = Learning()
    initializer_range: float = field(default=INITIAL_RANGE, compare=False)
    """standard deviation of new weights in transformers, kept for config.json; Cloze itself does not use it"""

    @property
    def encoder(self) -> Shape:
        """The shape of the encoder without heads, whatever its objective was."""
        return replace(self, learns=Learning(pairs=False, sees=self.learns.sees))

    def change_learning(self, **changes: Any) -> Shape:
        """Returns this shape with other values of what it learns by."""
        return replace(self, learns=replace(self.learns, **changes))

    def differences(self, other: Shape) -> list[tuple[str, Any, Any]]:
        """Lists the values that differ between two shapes and decide whether weights fit: name, value here, value
        there; a value that one architecture lacks is None."""
        ours, theirs = self.values(), other.values()
        names = [name for name in {**ours, **theirs} if name not in (*DROPOUT, "initializer_range")]
        return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]

    def values(self) -> dict[str, Any]:
        """Returns all values by name, as checkpoints store them: those of `learns` among them, and the architecture
        and `initializer_range` only if they differ from the defaults. Settings of the objective are called as in a
        recipe."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        usual = {"architecture": ARCHITECTURE, "initializer_range": INITIAL_RANGE}
        last = {name: value for name, default in usual.items() if (value := content.pop(name)) != default}
        learns = dict(vars(content.pop("learns")))
        learns |= {f"{OF_OBJECTIVE}{name}": value for name, value in learns.pop("settings")}
        return content | learns | last

    @property
    def one_way(self) -> bool:
        """Whether a piece sees only itself and the pieces on one side of it."""
        return self.learns.sees != "both"

    @property
    def one_way_share(self) -> float:
        """The share of the sequences in which a piece sees only itself and the pieces on one side of it."""
        return 1.0 if self.one_way else self.learns.causal_share

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class Role(NamedTuple):
    """The role of a weight, which optimizers and the draw of initial weights ask for."""

    kind: Literal["matrix", "table", "head", "norm", "bias"]
    """a matrix of a layer, a table of embeddings, a matrix of a head, the factors of a norm, or a bias"""
    parts: int = 1
    """number of weights of the paper that are joined in it, row after row"""
    initial_range: float = INITIAL_RANGE
    """standard deviation of its initial values; norms begin with ones, biases with zeros"""

    @property
    def decays(self) -> bool:
        """Whether weight decay falls on it."""
        return self.kind not in ("norm", "bias")


MATRIX, TABLE, HEAD, NORM, BIAS = (Role(kind) for kind in ("matrix", "table", "head", "norm", "bias"))
"""The usual role of each kind."""
