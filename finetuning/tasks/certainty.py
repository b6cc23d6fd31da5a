"""What so few items leave open: how far the figures of a split may lie from those of all items that could be asked.

A figure is given with its standard error: had other items of the same kind been chosen, about two figures of three
would lie within it. 90.5 ± 2.1 beside 90.0 on 200 items is one item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from data_prep.common.arrays import Array
from finetuning.results import ClassFigures
from finetuning.tasks.scores import Tally

DRAWS, MOST = 200, 10_000
"""How often items are drawn anew, and how many at most: that is a second for the slowest figures."""
DEVIATIONS = 1.959963984540054
"""Standard deviations in which 95% of a normal distribution lie."""


@dataclass(frozen=True)
class Certainty:
    """How many items a split has, and how sure its figures are."""

    items: int
    """Texts, questions or sentences: whatever was chosen by itself."""
    spreads: dict[str, float]
    """The standard errors of figures by their names."""
    classes: dict[str, ClassFigures] = field(default_factory=dict)
    """Of each class or type: its items, how often it was said, and recall and precision with their spreads."""


def spreads(items: int, figures: Callable[[Array], Mapping[str, float]]) -> dict[str, float]:
    """The standard errors of figures by the bootstrap: as many items are drawn again with replacement, the same ones
    every time, and `figures` computes those of the items of these numbers. No error is less than an item is worth.

    Of very many items fewer are drawn, whose figures spread as much more as the root of their share says.
    """
    size = min(items, MOST)
    draw = np.random.default_rng(0)
    drawn = [figures(draw.integers(items, size=size)) for _ in range(DRAWS)]
    narrower = math.sqrt(size / items)
    return {name: max(narrower * float(np.std([each[name] for each in drawn])), 1 / items) for name in drawn[0]}


def spread_of_share(right: float, items: float) -> float:
    """The standard error of a share of items, such as accuracy, by the binomial distribution; one item more of either
    kind is counted, since none wrong among ten does not prove that none can be."""
    share = (right + 1) / (items + 2)
    return math.sqrt(share * (1 - share) / max(items, 1))


def of_classes(names: Sequence[str], tally: Tally) -> dict[str, ClassFigures]:
    """Recall and precision of every class with their spreads, null where it has no items, or was never said."""
    found: dict[str, ClassFigures] = {}
    for name, right, true, said in zip(names, *(each.tolist() for each in tally), strict=True):
        found[name] = {"items": true, "said": said}
        for figure, among in (("recall", true), ("precision", said)):
            found[name] |= {figure: right / among if among else None}
            found[name] |= {f"{figure}_spread": spread_of_share(right, among) if among else None}
    return found


def wilson(right: ArrayLike, items: ArrayLike) -> tuple[Array, Array]:
    """The limits between which a share lies with 95% certainty that was right so often of so many, after Wilson (1927);
    of no item, 0 and 1."""
    items = np.maximum(np.asarray(items, np.float64), 1e-9)
    share, square = np.asarray(right, np.float64) / items, DEVIATIONS**2 / items
    middle = (share + square / 2) / (1 + square)
    reach = DEVIATIONS * np.sqrt(share * (1 - share) / items + square / (4 * items)) / (1 + square)
    return np.clip(middle - reach, 0, 1), np.clip(middle + reach, 0, 1)
