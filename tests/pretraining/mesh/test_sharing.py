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
    "rtl": Case("bert", "rtl"),
    "roberta, ltr": Case("roberta", "ltr"),
    "roberta, hybrid": Case("roberta", "hybrid", "lamb", zero=0),
    "gpt, recomputed": Case("gpt", "ltr", recompute=True),
    "modern, recomputed": Case("modern", "mlm", "muon", recompute=True, zero=2),
    "bf16": Case(optimizer="lamb", dtype="bf16"),
}


def train_all(tensor: int) -> dict[str, Found]:
    return {name: train(case, tensor) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> tuple[list[dict[str, Found]], dict[str, Found]]:
    """What all ranks of 2 x 2 learn of each case, and the first of two ranks with whole models."""
    return run_connected(4, partial(train_all, 2), timeout=300), run_connected(2, partial(train_all, 1), timeout=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_model_learn_the_same(
    found: tuple[list[dict[str, Found]], dict[str, Found]], name: str
) -> None:
    shared, wanted = [rank[name] for rank in found[0]], found[1][name]
    for rank in shared:
        apart = rank.measure_distance(wanted)
        if CASES[name].dtype == "fp32":
            assert apart["gradients"] < 1e-6
            assert max(apart["loss"], apart["norm"], apart["ratios"]) < 1e-5
            assert apart["right"] == 0
        else:
            assert apart["gradients"] < 2e-2
            assert apart["loss"] < 2e-3
            assert apart["norm"] < 5e-3
