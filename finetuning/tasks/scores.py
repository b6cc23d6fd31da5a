"""Figures by which predictions are compared with labels, and how sure these are.

Figures are always finite, and 0 where nothing can be told. Each is given with its standard error: had other items of
the same kind been chosen, about two figures of three would lie within it. 90.5 ± 2.1 beside 90.0 on 200 items is one
item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from data_prep.common.arrays import Array
from finetuning.ragged import Ragged
from finetuning.results import ClassFigures
from pretraining.huggingface.weights import Kind, TaskHead

Metric = Callable[[Array, Array], float]
"""Compares labels with predictions: classes (n,), or 0 and 1 (n, labels), or numbers (n,)."""
CONSTANT = 4 * float(np.finfo(np.float32).eps)
"""Numbers that differ by less, of the largest of them, are one number: a model says them in fp32."""
COLLAPSED = 1e-3
"""A model whose numbers spread by less, of the spread of the right ones, says one number of all items."""


def compute_answers(kind: Kind, logits: Array) -> Array:
    """The answers of a model, given its logits (n, outputs): classes or choices, 0 or 1 for each label, or numbers."""
    if kind == "score":
        return logits[:, 0].astype(np.float64)
    return (logits > 0).astype(np.int64) if kind == "labels" else logits.argmax(axis=1)


def compute_probabilities(kind: Kind, logits: Array) -> Array:
    """The probability (n, outputs) of each class or choice, which add up to 1, or of each label by itself."""
    logits = logits.astype(np.float64)
    if kind == "labels":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def is_degenerate(head: TaskHead, outputs: Ragged, right: Array | None = None) -> bool:
    """Tells whether a model says the same of every item, as after a training that failed.

    Numbers never are quite the same: by what is `right` those are judged that differ by rounding alone, which may well
    correlate with something.
    """
    if head.kind == "spans" or len(outputs.values) < 2:
        return False
    said = compute_answers(head.kind, outputs.values)
    if head.kind != "score":
        return bool((said == said[0]).all())
    spread = 0.0 if right is None else float(right.astype(np.float64).std())
    return _is_constant(said) or bool(said.std() <= COLLAPSED * spread)


class Tally(NamedTuple):
    """How often each of several classes, labels or types was said where it was right, was right, and was said."""

    right: Array
    true: Array
    said: Array


def tally(labels: Array, said: Array, classes: int = 2) -> Tally:
    """Counts at least so many classes (n,), or the labels of (n, labels)."""
    if labels.ndim == 2:
        return Tally((labels * said).sum(0), labels.sum(0), said.sum(0))
    classes = max(classes, int(labels.max()) + 1, int(said.max()) + 1)
    return Tally(*(np.bincount(each, minlength=classes) for each in (labels[labels == said], labels, said)))


def f1(right: Array, true: Array, said: Array) -> Array:
    """The harmonic mean of precision and recall, each by itself; 0 where nothing is right and nothing was said."""
    means: Array = 2 * right / np.maximum(true + said, 1)
    return means


def f1_second(labels: Array, said: Array) -> float:
    """F1 of class 1 of two."""
    return float(f1(*tally(labels, said))[1])


def f1_macro(labels: Array, said: Array) -> float:
    """F1 as the mean over labels, or over classes that are right or said of some item."""
    counts = tally(labels, said)
    each = f1(*counts)
    return float(np.mean(each if labels.ndim == 2 else each[counts.true + counts.said > 0]))


def f1_micro(labels: Array, said: Array) -> float:
    """F1 of all decisions together."""
    return float(f1(*(each.sum() for each in tally(labels, said))))


def accuracy(labels: Array, said: Array) -> float:
    """The share of the items that are wholly right."""
    return float(np.mean((labels == said).reshape(len(labels), -1).all(1)))


def matthews(labels: Array, said: Array) -> float:
    """The correlation of Matthews; 0 where one class alone is right, or is said."""
    items, (right, true, given) = len(labels), tally(labels, said)
    below = float(items**2 - true @ true) * float(items**2 - given @ given)
    return float(items * right.sum() - true @ given) / math.sqrt(below) if below else 0.0


def pearson(labels: Array, predictions: Array) -> float:
    """The correlation of numbers."""
    from scipy.stats import pearsonr  # which machines for measurements lack

    return _correlation(pearsonr, labels, predictions)


def spearman(labels: Array, predictions: Array) -> float:
    """The correlation of ranks."""
    from scipy.stats import spearmanr  # which machines for measurements lack

    return _correlation(spearmanr, labels, predictions)


def _correlation(function: Callable[[Array, Array], tuple[float, float]], labels: Array, predictions: Array) -> float:
    labels, predictions = labels.astype(np.float64), predictions.astype(np.float64)
    if _is_constant(labels) or _is_constant(predictions):
        return 0.0
    return float(function(labels, predictions)[0])


def _is_constant(numbers: Array) -> bool:
    """Tells whether numbers are all the same, or too few or too broken to correlate."""
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return True
    return bool(np.ptp(numbers) <= CONSTANT * np.abs(numbers).max())


AVERAGE = "average"
"""The mean of several figures of a split, by which GLUE compares where it has two."""
METRICS: dict[Kind, dict[str, Metric]] = {
    "classes": {
        "accuracy": accuracy,
        "f1": f1_second,
        "f1_macro": f1_macro,
        "f1_micro": f1_micro,
        "matthews": matthews,
    },
    "labels": {"f1_micro": f1_micro, "f1_macro": f1_macro, "accuracy": accuracy},
    "score": {"pearson": pearson, "spearman": spearman},
    "choice": {"accuracy": accuracy},
}
"""The figures that there are for each kind of task, the usual one first."""


def compute_figures(kind: Kind, metrics: Iterable[str], labels: Array, predictions: Array) -> dict[str, float]:
    """Computes these metrics; the average is that of those before it."""
    found: dict[str, float] = {}
    for name in metrics:
        figure = np.mean(list(found.values())) if name == AVERAGE else METRICS[kind][name](labels, predictions)
        found[name] = float(figure)
    return found


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
    """For each class or type: its items, how often it was said, and recall and precision with their spreads."""


def bootstrap_spreads(items: int, figures: Callable[[Array], Mapping[str, float]]) -> dict[str, float]:
    """The standard errors of figures by the bootstrap: as many items are drawn again with replacement, the same ones
    every time, and `figures` computes those of the items of these numbers. No error is less than an item is worth.

    Of very many items fewer are drawn, whose figures spread as much more as the root of their share says.
    """
    size = min(items, MOST)
    draw = np.random.default_rng(0)
    drawn = [figures(draw.integers(items, size=size)) for _ in range(DRAWS)]
    narrower = math.sqrt(size / items)
    return {name: max(narrower * float(np.std([each[name] for each in drawn])), 1 / items) for name in drawn[0]}


def estimate_share_spread(right: float, items: float) -> float:
    """The standard error of a share of items, such as accuracy, by the binomial distribution; one item more of either
    kind is counted, since none wrong among ten does not prove that none can be."""
    share = (right + 1) / (items + 2)
    return math.sqrt(share * (1 - share) / max(items, 1))


def describe_classes(names: Sequence[str], tally: Tally) -> dict[str, ClassFigures]:
    """Recall and precision of every class with their spreads, null where it has no items, or was never said."""
    found: dict[str, ClassFigures] = {}
    for name, right, true, said in zip(names, *(each.tolist() for each in tally), strict=True):
        found[name] = {"items": true, "said": said}
        for figure, among in (("recall", true), ("precision", said)):
            found[name] |= {figure: right / among if among else None}
            found[name] |= {f"{figure}_spread": estimate_share_spread(right, among) if among else None}
    return found


def compute_wilson_limits(right: ArrayLike, items: ArrayLike) -> tuple[Array, Array]:
    """The limits between which a share lies with 95% certainty that was right so often of so many, after Wilson (1927);
    of no item, 0 and 1."""
    items = np.maximum(np.asarray(items, np.float64), 1e-9)
    share, square = np.asarray(right, np.float64) / items, DEVIATIONS**2 / items
    middle = (share + square / 2) / (1 + square)
    reach = DEVIATIONS * np.sqrt(share * (1 - share) / items + square / (4 * items)) / (1 + square)
    return np.clip(middle - reach, 0, 1), np.clip(middle + reach, 0, 1)
