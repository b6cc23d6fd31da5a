"""Runs whose process group cannot be left, as NCCL's where a kernel waits for ranks that never come."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from support.faults import stay_in_the_group
from support.training import SAVES, Place, assert_ended, assert_same, assert_well, launch, train

from pretraining.processes.ending import Code


def test_a_rank_that_fails_alone_says_why_and_all_end(place: Place) -> None:
    run = launch(place.command("run"), fault=partial(stay_in_the_group, 3))
    assert_ended(run, Code.CURE, "error: rank 1: no room\n")


def test_a_good_run_ends_too(place: Place, straight: Path) -> None:
    command = place.command("run", *SAVES)
    assert_well(train(command, fault=stay_in_the_group))
    assert_same(place.folder / "run", straight)
