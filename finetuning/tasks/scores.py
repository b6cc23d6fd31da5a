"""Figures by which predictions are compared with labels: always finite, and 0 where nothing can be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from data_prep.common.arrays import Array
from finetuning.ragged import Ragged
from pretraining.huggingface.task_head import Kind, TaskHead

Metric = Callable[[Array, Array], float]
"""What compares labels with predictions: classes (n,), or 0 and 1 (n, labels), or numbers (n,)."""
CONSTANT = 1e-12
"""Numbers that differ by less, of the largest of them, are one number."""


def answers(kind: Kind, logits: Array) -> Array:
    """What a model says, given its logits (n, outputs): classes or choices, 0 or 1 for each label, or numbers."""
    if kind == "score":
        return logits[:, 0].astype(np.float64)
    return (logits > 0).astype(np.int64) if kind == "labels" else logits.argmax(axis=1)


def probabilities(kind: Kind, logits: Array) -> Array:
    """The probability (n, outputs) of each class or choice, which add up to 1, or of each label by itself."""
    logits = logits.astype(np.float64)
    if kind == "labels":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def is_degenerate(head: TaskHead, outputs: Ragged) -> bool:
    """Tells whether a model says the same of every item, as after a training that failed."""
    if head.kind == "spans" or len(outputs.values) < 2:
        return False
    said = answers(head.kind, outputs.values)
    return _is_constant(said) if head.kind == "score" else bool((said == said[0]).all())


def matthews(labels: Array, predictions: Array) -> float:
    """The correlation of Matthews."""
    if len(np.unique(labels)) < 2 or len(np.unique(predictions)) < 2:
        return 0.0
    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: Array, predictions: Array) -> float:
    """The correlation of numbers."""
    return _correlation(pearsonr, labels, predictions)


def spearman(labels: Array, predictions: Array) -> float:
    """The correlation of ranks."""
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
_f1 = partial(f1_score, zero_division=0.0)
_f1_macro, _f1_micro = partial(_f1, average="macro"), partial(_f1, average="micro")


def _of_labels(metric: Metric) -> Metric:
    """The metric for labels (n, labels), of which one alone is a class of two to scikit-learn."""
    return lambda labels, said: metric(labels, said) if labels.shape[1] > 1 else _f1(labels[:, 0], said[:, 0])


METRICS: dict[Kind, dict[str, Metric]] = {
    "classes": {
        "accuracy": accuracy_score,
        "f1": _f1,
        "f1_macro": _f1_macro,
        "f1_micro": _f1_micro,
        "matthews": matthews,
    },
    "labels": {"f1_micro": _of_labels(_f1_micro), "f1_macro": _of_labels(_f1_macro), "accuracy": accuracy_score},
    "score": {"pearson": pearson, "spearman": spearman},
    "choice": {"accuracy": accuracy_score},
}
"""The figures that there are for each kind of task, the usual one first. F1 is that of class 1 of two; `f1_macro` the
mean over classes or labels, `f1_micro` that of all decisions together; accuracy counts items that are wholly right."""


def figures(kind: Kind, metrics: Iterable[str], labels: Array, predictions: Array) -> dict[str, float]:
    """Computes these metrics; the average is that of those before it."""
    found: dict[str, float] = {}
    for name in metrics:
        figure = np.mean(list(found.values())) if name == AVERAGE else METRICS[kind][name](labels, predictions)
        found[name] = float(figure)
    return found
