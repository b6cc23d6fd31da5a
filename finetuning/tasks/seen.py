"""The items of a split as its files have them: what a person would look at before a model learns from them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.common.arrays import Array


@dataclass(frozen=True)
class Lengths:
    """How long something of the items is, in pieces, and how much of it a model is given."""

    what: str
    """`texts`, `questions`."""
    setting: str
    """The setting that limits them: `length`."""
    limit: int
    measure: Callable[[Array], Array]
    """The pieces of the sequences of the items of these numbers, if nothing were cut off."""
    cuts: bool = True
    """Whether what is beyond the limit is lost, rather than read in parts."""


@dataclass(frozen=True)
class Seen:
    """The items of a split."""

    texts: tuple[Sequence[str], ...]
    """Columns, which together are what is asked of an item."""
    answers: Sequence[Hashable]
    """What is right of every item, to tell where that differs."""
    lengths: tuple[Lengths, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """How often every class, label or kind of entity is right; empty where there are none."""
    numbers: Array | None = None
    """The numbers that are right, where the task asks for some."""

    def __len__(self) -> int:
        return len(self.texts[0])
