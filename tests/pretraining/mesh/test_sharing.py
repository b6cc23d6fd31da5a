"""Four ranks that share two models learn what two ranks with whole ones learn."""

from __future__ import annotations

from functools import partial

import pytest
from support.mesh import Case, Found, train
from support.training import run_connected

OPTIMIZERS = ("adamw", "lamb", "muon")
CASES = {
    **{
        f"{optimizer}, ZeRO {zero}": Case(optimizer=optimizer, zero=zero)
        for optimizer in OPTIMIZERS
        for zero in range(3)
    },
    "gpt": Case("gpt", "ltr", "lamb", heads=6),
    "roberta": Case("roberta", "mlm", "lamb", recompute=True),
    "modern": Case("modern", "mlm", "lamb"),
    "ltr": Case("bert", "ltr", "muon"),
    "hybrid": Case("bert", "hybrid", "muon", zero=2),
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
        assert apart["gradients"] < 1e-6
        assert apart["loss"] < 1e-5
        assert apart["norm"] < 1e-5
        assert apart["ratios"] < 1e-5
        assert apart["right"] == 0
