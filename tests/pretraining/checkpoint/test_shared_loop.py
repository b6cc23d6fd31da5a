"""Python's collector works at the same steps on all ranks; and what a loop says of CPUs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.finetuning import Toy, fine_tune
from support.training import assert_well

from finetuning.running.loop import Tuner
from pretraining.checkpoint.loop import GarbageCollection


class Knot:
    """Garbage that the collector alone finds."""

    def __init__(self) -> None:
        self.own = self


def tie() -> Callable[[], object]:
    """A new knot that nobody holds; says whether it is there."""
    return weakref.ref(Knot())


def test_it_collects_after_the_first_step_and_then_at_fixed_ones() -> None:
    with GarbageCollection() as garbage:
        before = tie()
        garbage.after_step(7)
        assert before() is None
        knot = tie()
        lists = [[] for _ in range(10**5)]  # type: ignore[var-annotated]  # at which it would look otherwise
        garbage.after_step(8)
        assert knot() is not None
        garbage.after_step(GarbageCollection.EVERY)
        assert knot() is None
        assert len(lists) == 10**5
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_loop_that_fails_before_its_first_step_leaves_it_on() -> None:
    with pytest.raises(ValueError), GarbageCollection():
        raise ValueError
    assert gc.isenabled()


def note_steps(path: Path) -> None:
    """Notes in a run of fine-tuning whether the collector works by itself before the end of each step."""
    after_step = Tuner.after_step

    def noted(self: Tuner) -> None:
        with path.open("a") as file:
            file.write(f"{gc.isenabled()}\n")
        after_step(self)

    setattr(Tuner, "after_step", noted)  # noqa: B010


def test_loops_collect_so(toy: Toy, tmp_path: Path) -> None:
    path = tmp_path / "collects.txt"
    assert_well(fine_tune(toy.command("out"), fault=partial(note_steps, path)))
    first, *others = path.read_text().split()
    assert first == "True"
    assert others
    assert {*others} == {"False"}
