"""Four ranks that share two models learn what two ranks with whole ones learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

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


FIRST = ("lamb, ZeRO 2",)
"""The others are slow."""


def train_all(names: Sequence[str], tensor: int) -> dict[str, Found]:
    return {name: train(CASES[name], tensor) for name in names}


@pytest.fixture(scope="module")
def find() -> Callable[[str], tuple[list[Found], Found]]:
    """Finds what all ranks of 2 x 2 learn of a case, and the first of two ranks with whole models; for many at once."""

    @cache
    def train_some(names: Sequence[str]) -> tuple[list[dict[str, Found]], dict[str, Found]]:
        shared, whole = partial(train_all, names, 2), partial(train_all, names, 1)
        return run_connected(4, shared, timeout=300), run_connected(2, whole, timeout=300)[0]

    def find(name: str) -> tuple[list[Found], Found]:
        shared, whole = train_some(FIRST if name in FIRST else (*(each for each in CASES if each not in FIRST),))
        return [rank[name] for rank in shared], whole[name]

    return find


@pytest.mark.parametrize(
    "name", [each if each in FIRST else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_ranks_that_share_a_model_learn_the_same(find: Callable[[str], tuple[list[Found], Found]], name: str) -> None:
    shared, wanted = find(name)
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
