"""Every architecture by the commands that a user types: trained, stopped, exported, scored, fine-tuned, asked."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.faults import stop_at
from support.marks import slow
from support.shards import make_shards
from support.sharing import made_once
from support.training import (
    CUT,
    Place,
    assert_ended,
    assert_same,
    assert_same_curve,
    assert_well,
    distance,
    launch,
    records,
    stopped_at,
    train,
)

from pretraining.architectures.declaration import architectures
from pretraining.processes.ending import Code

WORDS = {
    "bert": (),
    "roberta": ("--model.architecture", "roberta"),
    "gpt": ("--model.architecture", "gpt", "--objective.name", "ltr"),
    "modern": ("--model.architecture", "modern", "--model.window", "8"),
}
"""What names an architecture, and an objective that suits it; the window is narrower than most sequences."""
NAMES = [name for name in WORDS if name != "bert"]
"""Those of which no other file of this folder tells."""
SAVES = ("--checkpoints.every", "3", "--checkpoints.keep", "9")
WAYS = {
    "ZeRO 3": ("--parallel.zero", "3", *CUT),
    "bf16": ("--precision.dtype", "bf16"),
    "computed again": ("--compute.checkpoint_activations", "true"),
    "LAMB": ("--optimizer.name", "lamb", "--optimizer.trust_all", "true"),
    "Muon": ("--optimizer.name", "muon"),
}
FIGURES = ("masked_loss", "piece_loss")
"""The loss of one piece, by the objectives here."""


@pytest.fixture(scope="module")
def unpaired(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Shards without pairs: only BERT of these has a head for them."""
    data = made_once(tmp_path_factory.getbasetemp(), "unpaired", lambda folder: make_shards(folder, pairs="none"))
    return dataclasses.replace(shared, data=data, folder=tmp_path_factory.mktemp("architectures"))


def train_once(place: Place, name: str, *more: str, ranks: int = 2) -> Path:
    """A run that nothing happens to, unless there is one."""
    run = place.folder / f"{name} on {ranks} {' '.join(more)}".strip().replace("/", "")
    if not run.exists():
        said = assert_well(train(place.command(run, *WORDS[name], *SAVES, *more), ranks))
        assert "logits read back by Cloze and transformers agree to" in said
    return run


def find_loss(record: dict[str, Any]) -> float:
    (found,) = (record[figure] for figure in FIGURES if figure in record)
    return float(found)


def test_every_architecture_is_here() -> None:
    assert WORDS.keys() == architectures().keys()


@pytest.mark.parametrize("ranks", [2, slow(1)])
@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_run_is_the_straight_one(name: str, ranks: int, unpaired: Place, place: Place) -> None:
    straight = train_once(unpaired, name, ranks=ranks)
    assert find_loss(records(straight)[-1]) < find_loss(records(straight)[0])
    command = dataclasses.replace(unpaired, folder=place.folder).command("run", *WORDS[name], *SAVES)
    assert_ended(launch(command, ranks, partial(stop_at, 4)), Code.STOPPED, "after step 4, and saved")
    assert_well(train(command, ranks))
    assert_same(place.folder / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WORDS)
def test_every_way_to_train_goes_on_and_is_the_same_on_other_ranks(
    name: str, way: str, unpaired: Place, place: Place
) -> None:
    """And gone on with on one rank from a step of two."""
    given, words = dataclasses.replace(unpaired, folder=place.folder), (*WORDS[name], *SAVES, *WAYS[way])
    straight = train_once(given, name, *WAYS[way])
    command = given.command("run", *words)
    assert_ended(launch(command, 2, partial(stop_at, 4)), Code.STOPPED)
    assert_well(train(command))
    assert_same(place.folder / "run", straight)
    other = stopped_at(straight, place.folder / "other", 3)
    assert_well(train(given.command("other", *words), 1))
    tolerance = 3e-3 if way == "bf16" else 1e-4
    assert_same_curve(other, straight, tolerance)
    assert distance(other, straight) < tolerance
    if way in ("ZeRO 3", "computed again"):
        assert_same_curve(straight, train_once(unpaired, name), 1e-4)
