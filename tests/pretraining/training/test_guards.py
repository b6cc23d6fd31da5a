"""What is found wrong with losses and gradients, and which batches a run leaves out for it."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.training.guards import Guard, Skip, batch_number, first_of

skips = st.lists(
    st.builds(Skip, phase=st.integers(0, 1), first=st.integers(0, 40), count=st.integers(1, 6), reason=st.just(""))
)


@given(skips, st.integers(0, 1))
def test_the_batches_of_a_phase_are_those_that_are_not_left_out(skips: list[Skip], phase: int) -> None:
    out = {skip.first + index for skip in skips if skip.phase == phase for index in range(skip.count)}
    wanted = itertools.islice((number for number in itertools.count() if number not in out), 60)
    assert [batch_number(step, phase, skips) for step in range(60)] == list(wanted)


def test_a_guard_names_the_first_thing_wrong() -> None:
    good, bad = torch.tensor(5.0), torch.tensor(math.inf)
    examples = [torch.tensor([[0, 1], [0, 2]]).numpy(), torch.tensor([[3, 4], [3, 5]]).numpy()]
    guard = Guard(1, spike=2.0, scaled=False)
    guard.add(7, 17, [good, good], 1.0, examples)
    guard.add(8, 18, [good, bad], 1.0, examples)
    guard.add(9, 19, [bad, bad], math.nan, examples)
    found = guard.look()
    assert found is not None
    assert (found.step, found.batch) == (8, 18)
    assert found.text == "the loss is inf at step 8 on rank 1, of shard 3 row 4, shard 3 row 5"
    assert guard.look() is None
    guard.add(8, 18, [good, good], math.nan, examples)
    gradient = guard.look()
    assert gradient is not None
    assert first_of([gradient, None, found]) == found, "a loss says more than a gradient"
    scaled = Guard(1, spike=2.0, scaled=True)
    scaled.add(7, 17, [good, good], math.inf, examples)
    assert scaled.look() is None, "the scale is lowered for it"


def test_a_loss_leaps_above_the_median_of_many() -> None:
    guard = Guard(0, spike=2.0, scaled=False)
    assert not any(guard.leaps(loss) for loss in [9.0, 3.0] + [6.0] * 8)
    assert guard.leaps(8.01)
    assert not guard.leaps(7.99)
    never = Guard(0, spike=0.0, scaled=False)
    assert not any(never.leaps(loss) for loss in [6.0] * 20 + [1e9])
