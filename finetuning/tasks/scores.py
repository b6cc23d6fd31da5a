"""Metrics and their standard errors.

Metrics are always finite, and 0 where undefined. On another sample of items, about two of three figures would lie
within the standard error. 90.5 ± 2.1 beside 90.0 on 200 items is one item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from finetuning.inputs import Ragged
from finetuning.results import ClassFigures
from pretraining.architectures.weights import Kind, TaskHead

Metric = Callable[[Array, Array], float]
"""Compares labels with predictions: classes (n,), or 0 and 1 (n, labels), or numbers (n,)."""
CONSTANT = 4 * float(np.finfo(np.float32).eps)
"""Relative to the largest, numbers that differ by less are equal: a model computes in fp32."""
COLLAPSED = 1e-3
"""A model whose scores spread by less, relative to the right ones, predicts one number."""


def compute_answers(kind: Kind, logits: Array) -> Array:
    """Computes answers from logits (n, outputs): classes or choices, 0 or 1 for each label, or scores."""
    if kind == "score":
        return logits[:, 0].astype(np.float64)
    return (logits > 0).astype(np.int64) if kind == "labels" else logits.argmax(axis=1)


def compute_probabilities(kind: Kind, logits: Array) -> Array:
    """Computes probabilities (n, outputs): of classes or choices, which sum to 1, or of each label by itself."""
    logits = logits.astype(np.float64)
    if kind == "labels":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def is_degenerate(head: TaskHead, outputs: Ragged, right: Array | None = None) -> bool:
    """Tells whether a model gives every item the same answer, as after a failed training.

    Predicted scores are never exactly equal. They count as equal if their spread is tiny beside that of the `right`
    ones.
    """
    if head.kind == "spans" or len(outputs.values) < 2:
        return False
    said = compute_answers(head.kind, outputs.values)
    if head.kind != "score":
        return bool((said == said[0]).all())
    spread = 0.0 if right is None else float(right.astype(np.float64).std())
    return _is_constant(said) or bool(said.std() <= COLLAPSED * spread)


class ClassCounts(NamedTuple):
    """True positives, right items and predicted items of each class, label or type."""

    right: Array
    true: Array
    said: Array


def count_answers(labels: Array, said: Array, classes: int = 2) -> ClassCounts:
    """Counts classes (n,), at least this number of them, or labels (n, labels)."""
    if labels.ndim == 2:
        return ClassCounts((labels * said).sum(0), labels.sum(0), said.sum(0))
    classes = max(classes, int(labels.max()) + 1, int(said.max()) + 1)
    return ClassCounts(*(np.bincount(each, minlength=classes) for each in (labels[labels == said], labels, said)))


def f1(right: Array, true: Array, said: Array) -> Array:
    """F1 of each class; 0 where nothing is right and nothing is predicted."""
    return np.asarray(2 * right / np.maximum(true + said, 1))


def f1_second(labels: Array, said: Array) -> float:
    """F1 of class 1 of two."""
    return float(f1(*count_answers(labels, said))[1])


def f1_macro(labels: Array, said: Array) -> float:
    """Mean F1 over labels, or over classes that occur or are predicted."""
    counts = count_answers(labels, said)
    each = f1(*counts)
    return float(np.mean(each if labels.ndim == 2 else each[counts.true + counts.said > 0]))


def f1_micro(labels: Array, said: Array) -> float:
    """F1 over all decisions together."""
    return float(f1(*(each.sum() for each in count_answers(labels, said))))


def accuracy(labels: Array, said: Array) -> float:
    """The share of items that are right in all labels."""
    return float(np.mean((labels == said).reshape(len(labels), -1).all(1)))


def matthews(labels: Array, said: Array) -> float:
    """Matthews' correlation; 0 if one class alone occurs or is predicted."""
    items, (right, true, given) = len(labels), count_answers(labels, said)
    below = float(items**2 - true @ true) * float(items**2 - given @ given)
    return float(items * right.sum() - true @ given) / math.sqrt(below) if below else 0.0


def _correlate(name: Literal["pearsonr", "spearmanr"], labels: Array, predictions: Array) -> float:
    from scipy import stats  # which machines for measurements lack

    labels, predictions = labels.astype(np.float64), predictions.astype(np.float64)
    if _is_constant(labels) or _is_constant(predictions):
        return 0.0
    return float(getattr(stats, name)(labels, predictions)[0])


pearson, spearman = partial(_correlate, "pearsonr"), partial(_correlate, "spearmanr")
"""Pearson's correlation, and Spearman's rank correlation."""


def _is_constant(numbers: Array) -> bool:
    """Tells whether numbers are all equal, fewer than two or not finite, so that they have no correlation."""
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return True
    return bool(np.ptp(numbers) <= CONSTANT * np.abs(numbers).max())


AVERAGE = "average"
"""The mean of a split's figures, by which GLUE compares tasks with two."""
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
    "embeddings": {"spearman": spearman, "pearson": pearson},
}
"""The figures of each kind of task, the default first."""


def compute_figures(kind: Kind, metrics: Iterable[str], labels: Array, predictions: Array) -> dict[str, float]:
    """Computes these metrics; `average` is the mean of those before it."""
    found: dict[str, float] = {}
    for name in metrics:
        figure = np.mean(list(found.values())) if name == AVERAGE else METRICS[kind][name](labels, predictions)
        found[name] = float(figure)
    return found


DRAWS, MOST = 200, 10_000
"""Bootstrap draws, and maximum items of each: a second for the slowest figures."""


@dataclass(frozen=True)
class Certainty:
    """The number of items of a split, and the standard errors of its figures."""

    items: int
    """Independent items: texts, questions or sentences."""
    spreads: dict[str, float]
    """Standard errors of figures by name."""
    classes: dict[str, ClassFigures] = field(default_factory=dict)
    """For each class or type: right and predicted items, recall and precision with standard errors."""


def bootstrap_spreads(items: int, figures: Callable[[Array], Mapping[str, float]]) -> dict[str, float]:
    """Estimates the standard errors of figures by the bootstrap, with fixed draws; `figures` computes those of given
    items. No error is below the weight of one item.

    For large splits it draws a subsample, and scales its spread by sqrt(sample / items).
    """
    size = min(items, MOST)
    draw = np.random.default_rng(0)
    drawn = [figures(draw.integers(items, size=size)) for _ in range(DRAWS)]
    narrower = math.sqrt(size / items)
    return {name: max(narrower * float(np.std([each[name] for each in drawn])), 1 / items) for name in drawn[0]}


def estimate_share_spread(right: float, items: float) -> float:
    """Estimates the standard error of a share, such as accuracy, by the binomial distribution with one right and one
    wrong item added, so that it is not 0 if all items are right."""
    share = (right + 1) / (items + 2)
    return math.sqrt(share * (1 - share) / max(items, 1))


def describe_classes(names: Sequence[str], counts: ClassCounts) -> dict[str, ClassFigures]:
    """Computes recall and precision of every class with standard errors; None without right or predicted items."""
    found: dict[str, ClassFigures] = {}
    for name, right, true, said in zip(names, *(each.tolist() for each in counts), strict=True):
        found[name] = {"items": true, "said": said}
        for figure, among in (("recall", true), ("precision", said)):
            found[name] |= {figure: right / among if among else None}
            found[name] |= {f"{figure}_spread": estimate_share_spread(right, among) if among else None}
    return found
