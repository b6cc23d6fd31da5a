"""The time of a phase."""

from __future__ import annotations

import time

import pytest
import torch

from pretraining.training.phases import Clock


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
