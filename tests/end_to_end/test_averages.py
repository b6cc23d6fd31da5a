"""Averages of a run's last checkpoints, by the real commands: what they are of, how they do, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import run_main
from support.damage import flip
from support.training import CUT, SAVES, Place, assert_refused, assert_same, records, stopped_at, train

from pretraining import evaluate
from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.reading import load_checkpoint
from pretraining.checkpoint.record import AVERAGE, AVERAGED, EXPORT, FOLDER, RECORD
from pretraining.huggingface.folders import read_folder

AVERAGES = [*SAVES, "--checkpoints.average", "3"]


@pytest.fixture(scope="module")
def averaged(shared: Place, straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that averages its last three checkpoints."""
    place = replace(shared, folder=tmp_path_factory.mktemp("runs"))
    run = stopped_at(straight, place.folder / "averaged", 7)
    output = place.train("averaged", *AVERAGES)
    assert f"{run / AVERAGED}: exported" in output
    assert f'from_pretrained("{run / AVERAGED}")' in output or "no better" in output
    return run


def test_an_average_is_the_mean_and_is_compared_with_the_last(
    place: Place, straight: Path, averaged: Path, tmp_path: Path
) -> None:
    assert_same(averaged, straight)
    sources = [load_checkpoint(averaged / FOLDER / f"step-{step:08}")[1] for step in (6, 7, 8)]
    for name, weight in read_folder(averaged / AVERAGED)[1].items():
        mean = torch.stack([source[name].double() for source in sources]).mean(0)
        assert torch.allclose(weight.double(), mean, rtol=1e-6, atol=1e-8), name
    found, last = json.loads((averaged / AVERAGE).read_text()), records(averaged, "evaluation")[-1]
    assert found["steps"] == [6, 7, 8]
    assert found["last_loss"] == pytest.approx(last["masked_loss"] + last["next_loss"])
    words = (averaged / AVERAGED, "--data", place.data, "--length", "64", "--examples", "25", "--json")
    figures = json.loads(run_main(evaluate.main, *words))["figures"]
    assert found["loss"] == pytest.approx(figures["masked_loss"] + figures["next_loss"], rel=1e-5)
    assert "the mean of those after steps 6, 7, 8" in (averaged / AVERAGED / "README.md").read_text()
    assert StoredModel.open(str(averaged / AVERAGED)).summary().name == "averaged-averaged"


def test_a_finished_run_that_has_lost_its_average_makes_it_again(place: Place, averaged: Path, tmp_path: Path) -> None:
    run = stopped_at(averaged, tmp_path / "run", 8)
    before = (run / AVERAGED / "model.safetensors").read_bytes()
    shutil.rmtree(run / AVERAGED)
    (run / AVERAGE).unlink()
    output = place.train(run, *AVERAGES, ranks=1)
    assert "was not compared with the last one" in output
    assert (run / AVERAGED / "model.safetensors").read_bytes() == before
    flip(run / FOLDER / "step-00000006" / RECORD)  # which the last two do not need, and three do
    place.train(run, *SAVES, "--checkpoints.average", "2", ranks=1)
    assert (run / AVERAGED / "model.safetensors").read_bytes() != before
    shutil.rmtree(run / EXPORT)
    (said,) = train(place.command(run, *AVERAGES), ranks=1)
    assert (said.code, (run / EXPORT / "config.json").exists()) == (0, True)
    assert "there is no average of the last checkpoints" in said.errors + said.output


def test_what_has_no_average_is_refused(place: Place) -> None:
    assert_refused(place.command("few", "--checkpoints.keep", "2", "--checkpoints.average", "3"), "keep 3")


@pytest.mark.slow
def test_weights_are_averaged_that_no_rank_has_whole(place: Place, other_data: Path) -> None:
    """Nothing is held out, so that no validation has gathered them; of the last phase alone, whose heads are others."""
    words = [*SAVES, *CUT, "--parallel.zero", "3", "--checkpoints.average", "9", "--data", str(other_data)]
    output = place.train("run", *words, "--phases.0.objective", "ltr")
    assert "of 3 checkpoints, of steps 6, 7, 8, was not compared with the last one" in output
