"""What a phase does without a run, and what is found wrong with losses and gradients."""

import math
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.pretraining_reference import random_batch

from data_prep.common.errors import UserError
from pretraining.engine.step import StepResult
from pretraining.model.batch import PretrainingBatches
from pretraining.reporting.records import EvaluationRecord
from pretraining.training.guards import Finding, Guard, choose_first
from pretraining.training.phases import repeat_rows
from pretraining.training.skips import SKIPPED, read_skips
from pretraining.training.trainer import Trainer

GOOD, BAD = 5.0, math.inf


def add(guard: Guard, step: int, losses: list[float], norm: float, largest: float | None = None) -> None:
    """Gives a guard a step of two micro-batches, which is ten batches on in the order of the phase."""
    batches = [random_batch([3, 3], 50, first=first) for first in (1, 4)]
    result = StepResult([torch.tensor(loss) for loss in losses], [None, None], norm, largest)
    guard.add(step, step + 10, result, PretrainingBatches(tuple(batches), sequences=4, predictions=4))


def test_a_guard_names_the_first_thing_wrong() -> None:
    guard = Guard(1, 2, spike=2.0, scaled=False)
    add(guard, 7, [GOOD, GOOD], 1.0)
    add(guard, 8, [GOOD, BAD], 1.0)
    add(guard, 9, [BAD, BAD], math.nan)
    loss = guard.first_fault()
    assert loss == Finding(8, 18, "the loss is inf at step 8 on rank 1, of shard 0 row 4, shard 0 row 5")
    assert guard.first_fault() is None
    add(guard, 8, [GOOD, GOOD], math.nan)
    gradient = guard.first_fault()
    assert gradient is not None
    assert choose_first([gradient, None, loss]) == loss, "it says more"


def test_a_gradient_of_several_ranks_is_blamed_on_none() -> None:
    """Where the loss is scaled, one that overflows lowers the scale, and is no fault."""
    guards = [Guard(*place, spike=2.0, scaled=False) for place in ((0, 1), (0, 2), (1, 2))]
    scaled = Guard(1, 2, spike=2.0, scaled=True)
    for guard in (*guards, scaled):
        add(guard, 8, [GOOD, GOOD], math.nan)
    alone, first, second = (str(guard.first_fault()) for guard in guards)
    assert "rank 0 had shard 0 row 1" in alone
    assert first == second
    assert "not known which of 2 ranks" in first
    assert "row" not in first
    assert scaled.first_fault() is None


@pytest.mark.parametrize(("norm", "said"), [(math.inf, "parallel.same_bits, 1,365.2, at step 8"), (math.nan, "nan")])
def test_a_gradient_that_is_too_large_for_its_sums_is_told_from_no_number(norm: float, said: str) -> None:
    guard = Guard(0, 2, spike=2.0, scaled=False)
    add(guard, 8, [GOOD, GOOD], norm, largest=8191 / 6)
    assert said in str(guard.first_fault())


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
    assert not any(guard.is_leap(loss) for loss in [9.0, 3.0] + [6.0] * 8)
    assert guard.is_leap(8.01)
    assert not guard.is_leap(7.99)
    never = Guard(0, 1, spike=0.0, scaled=False)
    assert not any(never.is_leap(loss) for loss in [6.0] * 20 + [1e9])


def test_a_list_of_batches_to_leave_out_that_is_damaged_is_named(tmp_path: Path) -> None:
    assert read_skips(tmp_path) == []
    (tmp_path / SKIPPED).touch()
    with pytest.raises(UserError, match=SKIPPED):
        read_skips(tmp_path)


def test_copied_positions_repeat_those_that_are_trained() -> None:
    rows = repeat_rows(torch.arange(12.0).view(12, 1), trained=4)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("last", [6, 7])
def test_a_phase_that_ends_where_it_was_scored_asks_the_pairs_alone(last: int) -> None:
    """By the clock it may; what it scored before stays, for the card of the model."""
    pairs = EvaluationRecord(7, 1, {"pairs_accuracy": 0.75}, 0, 2.0, ["pairs"])
    scores = EvaluationRecord(last, 1, {"masked_loss": 5.0}, 64, 1.0, ["masked"])
    trainer, phase = Mock(scores=scores), Mock(number=0, evaluate=Mock(return_value=pairs))
    trainer.state.step, trainer.meter.watch.pause = 7, nullcontext
    Trainer.evaluate(trainer, phase, ends=True)
    [asked], [written] = phase.evaluate.call_args_list, trainer.log.write.call_args_list
    assert asked.args[3:] == (last < 7, True)
    assert dict(written.args[0].learns) == {"pairs_accuracy": 0.75}
    expected = {"masked_loss": 5.0, "pairs_accuracy": 0.75} if last == 7 else {"pairs_accuracy": 0.75}
    assert (dict(trainer.scores.learns), trainer.scores.scored_examples) == (expected, 64 if last == 7 else 0)
