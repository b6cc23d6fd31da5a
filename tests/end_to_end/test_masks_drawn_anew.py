"""Runs whose masks are drawn anew: of any ranks the same, resumed bit for bit, exported, fine-tuned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.faults import stop_at
from support.finetuning import fine_tune, write_toy
from support.shards import make_shards
from support.training import Place, assert_ended, assert_same, assert_same_curve, assert_well, launch, train

from pretraining.processes.ending import Code

MASKS = ["--objective.masks", "dynamic", "--objective.rate", "0.4", "--objective.last_rate", "0.1"]
WORDS = [*MASKS, "--objective.split", "[0.6, 0.3, 0.1]", "--logging.every", "1", "--checkpoints.keep", "9"]


@pytest.mark.slow
@pytest.mark.parametrize("pairs", ["nsp", "none", "full-sentences"])
def test_a_stopped_run_is_the_straight_one_on_any_ranks(place: Place, pairs: str) -> None:
    """Without pairs it is as RoBERTa, whose examples go across documents."""
    if pairs != "nsp":
        place = replace(place, data=make_shards(place.folder / pairs, pairs=pairs))
    said = assert_well(train(place.command("straight", *WORDS)))
    assert "masks are drawn anew in every epoch, a share of 0.4 to 0.1 of the pieces" in said
    straight = place.folder / "straight"
    stopped = place.command("stopped", *WORDS)
    for step in (3, 7):
        assert_ended(launch(stopped, fault=partial(stop_at, step)), Code.STOPPED, f"after step {step}, and saved")
    assert_well(train(stopped))
    assert_same(place.folder / "stopped", straight)
    assert_well(train(place.command("one", *WORDS), ranks=1))
    assert_same_curve(place.folder / "one", straight, 1e-5)
    assert "last_rate = 0.1" in (straight / "export" / "README.md").read_text()
    toy = replace(write_toy(place.folder / "toy"), model=straight / "export", folder=place.folder)
    assert_well(fine_tune(toy.command("tuned")))
