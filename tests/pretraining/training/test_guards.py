"""What is found wrong with losses and gradients, and the list of batches that are left out for it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.pretraining_reference import random_batch

from data_prep.common.errors import UserError
from pretraining.engine.step import StepResult
from pretraining.model.batch import PretrainingBatches
from pretraining.training.guards import Finding, Guard, choose_first
from pretraining.training.skips import SKIPPED, read_skips

GOOD, BAD = 5.0, math.inf


def add(guard: Guard, step: int, losses: list[float], norm: float) -> None:
    """Gives a guard a step of two micro-batches, which is ten batches on in the order of the phase."""
    batches = [random_batch([3, 3], 50, first=first) for first in (1, 4)]
    result = StepResult([torch.tensor(loss) for loss in losses], [None, None], norm)
    guard.add(step, step + 10, result, PretrainingBatches(tuple(batches), sequences=4, predictions=4))


def test_a_guard_names_the_first_thing_wrong() -> None:
    guard = Guard(1, 2, spike=2.0, scaled=False)
    add(guard, 7, [GOOD, GOOD], 1.0)
    add(guard, 8, [GOOD, BAD], 1.0)
    add(guard, 9, [BAD, BAD], math.nan)
    found = guard.first_fault()
    text = "the loss is inf at step 8 on rank 1, of shard 0 row 4, shard 0 row 5"
    assert found == Finding(8, 18, text)
    assert guard.first_fault() is None


def test_a_loss_says_more_than_a_gradient() -> None:
    guard = Guard(1, 2, spike=2.0, scaled=False)
    add(guard, 8, [GOOD, BAD], 1.0)
    loss = guard.first_fault()
    add(guard, 8, [GOOD, GOOD], math.nan)
    gradient = guard.first_fault()
    assert gradient is not None
    assert choose_first([gradient, None, loss]) == loss


def test_a_gradient_of_several_ranks_is_blamed_on_none() -> None:
    texts = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        guard = Guard(rank, ranks, spike=2.0, scaled=False)
        add(guard, 8, [GOOD, GOOD], math.nan)
        found = guard.first_fault()
        assert found is not None
        texts.append(found.text)
    assert "rank 0 had shard 0 row 1" in texts[0]
    assert texts[1] == texts[2]
    assert "not known which of 2 ranks" in texts[1]
    assert "row" not in texts[1]


def test_where_the_loss_is_scaled_a_gradient_that_overflows_lowers_the_scale() -> None:
    guard = Guard(1, 2, spike=2.0, scaled=True)
    add(guard, 7, [GOOD, GOOD], math.inf)
    assert guard.first_fault() is None


@pytest.mark.usefixtures("alone")
def test_a_leap_over_few_losses_is_known_where_the_state_is_saved() -> None:
    guard = Guard(0, 1, spike=2.0, scaled=False)
    assert guard.find_leap() is None
    for step, (loss, leapt) in enumerate([(1e19, None), (3.0, None), (2.9, None), (5.5, 11.0), (2.0, None)]):
        add(guard, step, [loss, loss], 1.0)
        assert guard.first_fault() is None
        assert guard.find_leap() == leapt
    guard.begin_phase()
    add(guard, 5, [5.5, 5.5], 1.0)
    assert guard.first_fault() is None
    assert guard.find_leap() is None
    guard.losses.extend([8.0, 8.5])
    assert guard.find_leap() == 11.0


def test_a_loss_leaps_above_the_median_of_many() -> None:
    guard = Guard(0, 1, spike=2.0, scaled=False)
    assert not any(guard.leaps(loss) for loss in [9.0, 3.0] + [6.0] * 8)
    assert guard.leaps(8.01)
    assert not guard.leaps(7.99)
    never = Guard(0, 1, spike=0.0, scaled=False)
    assert not any(never.leaps(loss) for loss in [6.0] * 20 + [1e9])


def test_a_list_of_batches_to_leave_out_that_is_damaged_is_named(tmp_path: Path) -> None:
    assert read_skips(tmp_path) == []
    (tmp_path / SKIPPED).touch()
    with pytest.raises(UserError, match=SKIPPED):
        read_skips(tmp_path)
