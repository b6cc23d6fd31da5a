"""How far figures may be off by chance: as the formulas say where there are some, the same every time, and fast."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from scipy.stats import binomtest

from finetuning.tasks.scores import (
    METRICS,
    bootstrap_spreads,
    compute_figures,
    compute_wilson_limits,
    describe_classes,
    estimate_share_spread,
    tally,
)


def test_spreads_are_those_of_the_formulas_and_always_the_same() -> None:
    draw = np.random.default_rng(1)
    truth = draw.normal(size=1000)
    said = truth + draw.normal(size=1000)
    right = (draw.random(1000) < 0.9).astype(np.int64)

    def of(chosen: np.ndarray) -> dict[str, float]:
        return {
            **compute_figures("score", METRICS["score"], truth[chosen], said[chosen]),
            "share": right[chosen].mean(),
        }

    found = bootstrap_spreads(1000, of)
    assert found == bootstrap_spreads(1000, of)
    assert found["pearson"] == pytest.approx((1 - np.corrcoef(truth, said)[0, 1] ** 2) / math.sqrt(1000), rel=0.2)
    assert found["share"] == pytest.approx(estimate_share_spread(right.sum(), 1000), rel=0.2)


def test_one_item_of_two_hundred_is_within_the_spread() -> None:
    assert round(100 * estimate_share_spread(181, 200), 1) == 2.1
    assert estimate_share_spread(20, 20) > 0.03  # all are right, but few
    assert bootstrap_spreads(50, lambda chosen: {"f1": 1.0}) == {"f1": 1 / 50}


def test_many_items_take_a_second_at_most() -> None:
    draw = np.random.default_rng(1)
    labels, said = draw.integers(0, 20, (2, 50_000))
    begin = time.process_time()
    found = bootstrap_spreads(
        50_000, lambda chosen: compute_figures("classes", METRICS["classes"], labels[chosen], said[chosen])
    )
    assert time.process_time() - begin < 5  # a fraction of a second where nothing else runs
    assert found["accuracy"] == pytest.approx(estimate_share_spread((labels == said).sum(), 50_000), rel=0.2)


def test_classes_have_their_items_and_null_where_there_are_none() -> None:
    found = describe_classes(("a", "b", "c"), tally(np.array([0, 0, 1]), np.array([0, 1, 1]), 3))
    assert (found["a"]["items"], found["a"]["said"], found["a"]["recall"], found["a"]["precision"]) == (2, 1, 0.5, 1)
    assert found["c"]["recall"] is found["c"]["recall_spread"] is None
    several = tally(np.array([[1, 0], [1, 1]]), np.array([[1, 0], [0, 1]]))
    assert describe_classes(("x", "y"), several)["x"]["recall"] == 0.5


@pytest.mark.parametrize(("right", "items"), [(0, 1), (1, 1), (7, 7), (181, 200), (9_000, 9_815)])
def test_an_interval_is_that_of_wilson(right: int, items: int) -> None:
    wanted = binomtest(right, items).proportion_ci(method="wilson")
    low, high = compute_wilson_limits(right, items)
    assert (float(low), float(high)) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


def test_nothing_is_known_of_no_item() -> None:
    low, high = compute_wilson_limits([0, 5], [0, 10])
    assert (low[0], high[0]) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert low[1] < 0.5 < high[1]
