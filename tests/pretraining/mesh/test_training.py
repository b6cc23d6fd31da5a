"""The real command with ranks that share a model, and what it refuses of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.training import assert_refused, assert_same_curve, assert_well, records, train

if TYPE_CHECKING:
    from support.training import Place

SHARED = ("--parallel.tensor", "2")


def test_four_ranks_that_share_models_train_as_two_that_have_whole_ones(place: Place) -> None:
    """With validation, and all figures: what ranks have alike counts once."""
    output = assert_well(train(place.command("shared", *SHARED), ranks=4, seconds=300))
    assert "4 ranks on cpu, of which 2 share a model" in output
    assert_well(train(place.command("whole"), ranks=2, seconds=300))
    assert_same_curve(place.folder / "shared", place.folder / "whole", 1e-5)
    for shared, whole in zip(*(records(place.folder / run, "evaluation") for run in ("shared", "whole")), strict=True):
        assert shared["scored_examples"] == whole["scored_examples"]
        assert shared["masked_loss"] == pytest.approx(whole["masked_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parallel.zero", "3"), "parallel.tensor = 2: not with parallel.zero = 3"),
        (("--compute.compile", "true"), "parallel.tensor = 2: not with compute.compile = true"),
        (("--compute.kernels", "torch"), 'parallel.tensor = 2: not with compute.kernels = "torch"'),
        (("--model.heads", "1"), "parallel.tensor = 2: does not divide model.heads = 1; take 1"),
        (("--model.intermediate", "65"), "parallel.tensor = 2: does not divide model.intermediate = 65; take 1"),
        (("--objective.name", "rtd"), 'parallel.tensor = 2: not with objective.name = "rtd"'),
        (("--phases.1.objective", "ltr"), "parallel.tensor = 2: not with phases of several objectives, mlm and ltr"),
        ((), "parallel.tensor = 2: does not divide the ranks, 1; start a multiple of 2, or take 1"),
    ],
)
def test_what_ranks_cannot_share_is_refused(place: Place, words: tuple[str, ...], message: str) -> None:
    assert_refused(place.command("refused", *SHARED, *words), message)
