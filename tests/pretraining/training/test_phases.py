"""A phase of training: what it does without a run, and its time."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretraining.reporting.records import EvaluationRecord
from pretraining.training.phases import Clock, repeat_rows
from pretraining.training.trainer import Trainer


def test_copied_positions_repeat_those_that_are_trained() -> None:
    rows = repeat_rows(torch.arange(12.0).view(12, 1), trained=4)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("last", [6, 7])
def test_a_phase_that_ends_where_it_was_scored_asks_the_pairs_alone(last: int) -> None:
    """By the clock it may; what it scored before stays, for the card of the model."""
    asked, written = list[tuple[bool, bool]](), list[EvaluationRecord]()

    def evaluate(_: object, step: int, *arguments: Any) -> EvaluationRecord:
        asked.append(arguments[1:])
        return EvaluationRecord(step, 1, {"pairs_accuracy": 0.75}, 0, 2.0, ["pairs"])

    watch = SimpleNamespace(pause=nullcontext)
    scores = EvaluationRecord(last, 1, {"masked_loss": 5.0}, 64, 1.0, ["masked"])
    trainer: Any = SimpleNamespace(scores=scores, state=SimpleNamespace(step=7), engine=None)
    trainer.meter, trainer.log = SimpleNamespace(watch=watch), SimpleNamespace(write=written.append)
    trainer.show_progress = trainer.mark_or_give_up = lambda *_: None
    phase: Any = SimpleNamespace(number=0, evaluate=evaluate)
    Trainer.evaluate(trainer, phase, ends=True)
    assert asked == [(last < 7, True)]
    assert [dict(record.learns) for record in written] == [{"pairs_accuracy": 0.75}]
    expected = {"masked_loss": 5.0, "pairs_accuracy": 0.75} if last == 7 else {"pairs_accuracy": 0.75}
    assert dict(trainer.scores.learns) == expected
    assert trainer.scores.scored_examples == (64 if last == 7 else 0)


@pytest.mark.timed
@pytest.mark.usefixtures("alone")
def test_the_clock_is_the_same_everywhere_and_estimates_between() -> None:
    clock = Clock(100.0, torch.device("cpu"))
    clock.step()
    assert (clock.seconds, clock.agreed) == (100.0, False)
    time.sleep(0.05)
    clock.agree()
    pace = clock.seconds - 100
    assert clock.agreed
    assert 0.05 <= pace < 0.5
    clock.step()
    clock.step()
    assert clock.seconds == pytest.approx(100 + 3 * pace)
