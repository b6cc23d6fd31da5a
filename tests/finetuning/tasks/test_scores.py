"""Figures beside plain restatements of them, how far they may be off by chance, and where nothing can be told."""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tasks import rows, saying

from data_prep.common.arrays import Array
from finetuning.tasks import scores
from pretraining.architectures.weights import TaskHead


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """No figure warns on the console."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def plain_f1(labels: Array, predictions: Array, label: int = 1) -> float:
    right = sum((labels == label) & (predictions == label))
    said, true = sum(predictions == label), sum(labels == label)
    return 2 * right / (said + true) if right else 0.0


def plain_matthews(labels: Array, predictions: Array) -> float:
    tp, tn = sum((labels == 1) & (predictions == 1)), sum((labels == 0) & (predictions == 0))
    fp, fn = sum((labels == 0) & (predictions == 1)), sum((labels == 1) & (predictions == 0))
    below = float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return float(tp * tn - fp * fn) / below if below else 0.0


def plain_pearson(labels: Array, predictions: Array) -> float:
    first, second = labels - labels.mean(), predictions - predictions.mean()
    return float((first * second).sum() / ((first**2).sum() * (second**2).sum()) ** 0.5)


def ranks(values: Array) -> Array:
    """From 1; equal values share the mean of theirs."""
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


BINARY = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30).map(np.array)


@settings(max_examples=40)
@given(BINARY)
def test_figures_of_two_classes_are_the_plain_ones(pairs: Array) -> None:
    labels, predictions = pairs.T
    found = scores.compute_figures("classes", ("accuracy", "f1", scores.AVERAGE), labels, predictions)
    assert found["accuracy"] == pytest.approx((labels == predictions).mean())
    assert found["f1"] == pytest.approx(plain_f1(labels, predictions))
    assert found[scores.AVERAGE] == pytest.approx((found["accuracy"] + found["f1"]) / 2)
    assert scores.matthews(labels, predictions) == pytest.approx(plain_matthews(labels, predictions))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_correlations_are_the_plain_ones(seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels, predictions = draw.integers(0, 26, 40) / 5, draw.normal(size=40)
    assert scores.pearson(labels, predictions) == pytest.approx(plain_pearson(labels, predictions))
    assert scores.spearman(labels, predictions) == pytest.approx(plain_pearson(ranks(labels), ranks(predictions)))


def test_macro_is_the_mean_over_classes_and_micro_counts_all_decisions() -> None:
    labels, predictions = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 2, 2, 0])
    each = [plain_f1(labels, predictions, label) for label in range(3)]
    assert scores.METRICS["classes"]["f1_macro"](labels, predictions) == pytest.approx(np.mean(each))
    assert scores.METRICS["classes"]["f1_micro"](labels, predictions) == pytest.approx(4 / 6)
    several, said = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[1, 0], [0, 1], [0, 1]])
    found = scores.compute_figures("labels", scores.METRICS["labels"], several, said)
    assert found["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert (found["f1_micro"], found["accuracy"]) == pytest.approx((2 * 2 / (3 + 3), 1 / 3))
    one, nothing = np.array([[1], [0], [0], [0]]), np.zeros((4, 1), np.int64)  # a label alone is scored as more are
    assert [scores.METRICS["labels"]["f1_micro"](one, said) for said in (nothing, one)] == [0, 1]


@pytest.mark.parametrize("constant", [0, 1])
def test_one_class_alone_scores_zero_and_warns_of_nothing(constant: int) -> None:
    some, same = np.array([0, 1, 1, 0]), np.full(4, constant)
    assert scores.matthews(some, same) == scores.matthews(same, some) == scores.matthews(same, same) == 0
    assert np.isfinite(list(scores.compute_figures("classes", scores.METRICS["classes"], some, same).values())).all()
    several = np.stack([some, same], 1)
    found = scores.compute_figures("labels", scores.METRICS["labels"], several, np.zeros_like(several))
    assert np.isfinite(list(found.values())).all()


@pytest.mark.parametrize("constant", [0.0, 2.5, 1e30, float("nan"), float("inf")])
def test_constant_and_broken_scores_correlate_with_nothing(constant: float) -> None:
    some, same = np.array([0.0, 1.0, 2.5]), np.full(3, constant, np.float32)
    for metric in scores.METRICS["score"].values():
        assert metric(some, same) == metric(same, some) == 0
        assert metric(some[:1], some[:1]) == 0
    nearly = np.float32(2.5) + np.array([0, 1e-15, -1e-15])
    assert scores.pearson(some, nearly) == 0


def test_a_model_that_says_one_thing_alone_is_degenerate() -> None:
    classes = TaskHead("classes", ("a", "b", "c"))
    assert scores.is_degenerate(classes, saying([2, 2, 2], 3))
    assert not scores.is_degenerate(classes, saying([2, 2, 0], 3))
    assert scores.is_degenerate(TaskHead("choice"), saying([1, 1], 4))
    assert scores.is_degenerate(TaskHead("score"), rows([[2.5], [2.5]]))
    assert not scores.is_degenerate(TaskHead("score"), rows([[2.5], [2.6]]))
    years, rounded = np.array([[1776.0], [1912], [1844]]), rows([[1844.01], [1844.03], [1844.02]])
    assert scores.pearson(years[:, 0], rounded.values[:, 0]) > 0.9  # by chance
    assert scores.is_degenerate(TaskHead("score"), rounded, years)
    assert not scores.is_degenerate(TaskHead("score"), rows([[1840], [1850], [1845]]), years)
    labels = TaskHead("labels", ("a", "b"))
    assert scores.is_degenerate(labels, rows([[-1, 2], [-3, 1]]))
    assert not scores.is_degenerate(labels, rows([[-1, 2], [3, 1]]))
    assert not scores.is_degenerate(TaskHead("spans"), rows([[1, 0], [1, 0]]))


def test_probabilities_are_finite_whatever_the_logits() -> None:
    logits = np.array([[1000.0, -1000.0], [0.0, 0.0]], np.float32)
    assert scores.compute_probabilities("classes", logits) == pytest.approx(np.array([[1, 0], [0.5, 0.5]]))
    assert scores.compute_probabilities("labels", logits) == pytest.approx(np.array([[1, 0], [0.5, 0.5]]))
    assert scores.compute_answers("labels", logits).tolist() == [[1, 0], [0, 0]]


def test_spreads_are_those_of_the_formulas_and_always_the_same() -> None:
    draw = np.random.default_rng(1)
    truth, noise = draw.normal(size=(2, 1000))
    said, right = truth + noise, draw.random(1000) < 0.9

    def of(chosen: Array) -> dict[str, float]:
        return {"pearson": scores.pearson(truth[chosen], said[chosen]), "share": right[chosen].mean()}

    found = scores.bootstrap_spreads(1000, of)
    assert found == scores.bootstrap_spreads(1000, of)
    assert found["pearson"] == pytest.approx((1 - np.corrcoef(truth, said)[0, 1] ** 2) / math.sqrt(1000), rel=0.2)
    assert found["share"] == pytest.approx(scores.estimate_share_spread(right.sum(), 1000), rel=0.2)


def test_one_item_of_two_hundred_is_within_the_spread() -> None:
    assert round(100 * scores.estimate_share_spread(181, 200), 1) == 2.1
    assert scores.estimate_share_spread(20, 20) > 0.03  # all are right, but few
    assert scores.bootstrap_spreads(50, lambda chosen: {"f1": 1.0}) == {"f1": 1 / 50}


def test_of_many_items_a_sample_is_drawn() -> None:
    draw, sizes = np.random.default_rng(1), set()
    labels, said = draw.integers(0, 20, (2, 50_000))

    def share(chosen: Array) -> dict[str, float]:
        sizes.add(len(chosen))
        return {"accuracy": float((labels[chosen] == said[chosen]).mean())}

    found = scores.bootstrap_spreads(50_000, share)
    assert sizes == {scores.MOST}
    assert found["accuracy"] == pytest.approx(scores.estimate_share_spread((labels == said).sum(), 50_000), rel=0.2)


def test_classes_have_their_items_and_null_where_there_are_none() -> None:
    found = scores.describe_classes(("a", "b", "c"), scores.count_answers(np.array([0, 0, 1]), np.array([0, 1, 1]), 3))
    assert (found["a"]["items"], found["a"]["said"], found["a"]["recall"], found["a"]["precision"]) == (2, 1, 0.5, 1)
    assert found["c"]["recall"] is found["c"]["recall_spread"] is None
    several = scores.count_answers(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]]))
    assert scores.describe_classes(("x", "y"), several)["x"]["recall"] == 0.5
