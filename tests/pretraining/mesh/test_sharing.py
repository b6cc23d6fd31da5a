"""Four ranks that share two models learn what two ranks with whole ones learn."""

from __future__ import annotations

from functools import partial

import pytest
from support.mesh import Case, Found, train
from support.training import run_connected

CASES = {
    "zero 0": Case(zero=0),
    "zero 1": Case(zero=1),
    "zero 2": Case(zero=2),
}


def train_all(tensor: int) -> dict[str, Found]:
    return {name: train(case, tensor) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> tuple[list[dict[str, Found]], dict[str, Found]]:
    """Of all ranks of 2 x 2, and of the first of two ranks with whole models."""
    return run_connected(4, partial(train_all, 2), timeout=300), run_connected(2, partial(train_all, 1), timeout=300)[0]


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_model_learn_the_same(
    found: tuple[list[dict[str, Found]], dict[str, Found]], name: str
) -> None:
    shared, wanted = found
    for rank in shared:
        apart = rank[name].measure_distance(wanted[name])
        print(name, {key: f"{value:.1e}" for key, value in apart.items()})
        assert apart["gradients"] < 1e-6
        assert apart["loss"] < 1e-5
        assert apart["norm"] < 1e-5
        assert apart["right"] == 0
