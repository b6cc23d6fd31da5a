"""What a recipe can say of its objective: six splits on one folder, and what cannot be, with its cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import faults, write_plain
from support.training import Place

from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining import train
from pretraining.config.overrides import load_recipe, load_recipe_and_data
from pretraining.config.settings import Objective, Recipe
from pretraining.objectives.declaration import configure_objective

DYNAMIC = ["--objective.masks", "dynamic"]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_plain(tmp_path)


def test_a_rate_that_moves_needs_steps(plain: Path) -> None:
    words = [*DYNAMIC, "--objective.last-rate", "0.15"]
    by_clock = ["--hours", "2", "--phases.0.share", "0.9", "--phases.1.share", "0.1"]
    assert load_recipe(plain, words).as_dict()["objective"]["last_rate"] == 0.15
    [fault] = faults(plain, *words, *by_clock)
    assert fault.startswith("--objective.last_rate = 0.15: moves with the steps of a run")
    load_recipe(plain, [*DYNAMIC, "--objective.rate", "0.3", *by_clock])


def test_a_recipe_reads_back_as_it_was_understood(plain: Path, tmp_path: Path) -> None:
    words = [*DYNAMIC, "--objective.rate", "0.3", "--objective.last_rate", ".15", "--objective.next_sentences", "false"]
    recipe = load_recipe(plain, [*words, "--objective.split", "[0.8, 0.0, 0.2]"])
    assert recipe.as_dict()["objective"]["split"] == [0.8, 0.0, 0.2]
    written = tmp_path / "written.toml"
    written.write_text(recipe.as_toml())
    assert load_recipe(written) == recipe
    assert Recipe.model_validate(recipe.as_dict()) == recipe


def test_masks_of_whole_words_stay_static(place: Place) -> None:
    manifest, anew = Manifest.read(place.data), configure_objective(Objective.model_validate({"masks": "dynamic"}))
    for masking, wrong in (("token", False), ("whole-word", True)):
        settings = manifest.settings.model_copy(update={"masking": masking})
        found = [*anew.data_faults(manifest.model_copy(update={"settings": settings}))]
        assert [fault.partition(":")[0] for fault in found] == ['objective.masks = "dynamic"'] * wrong


def test_without_next_sentences_there_is_no_head_for_them(plain: Path, place: Place) -> None:
    lengths = ["--phases.0.length", "64", "--phases.1.length", "64"]
    for word, pairs in (("true", True), ("false", False)):
        recipe, manifest = load_recipe_and_data(plain, [*lengths, "--objective.next_sentences", word], place.data)
        assert recipe.shape(manifest).pairs == pairs
    with pytest.raises(UserError, match=r"objective.next_sentences = 1: true or false is needed"):
        load_recipe(plain, [*lengths, "--objective.next_sentences", "1"])


def test_an_objective_that_needs_pairs_is_refused_by_data_without(place: Place) -> None:
    class Needy(type(configure_objective(Objective()))):  # type: ignore[misc]
        pairs = "needed"

    manifest = Manifest.read(place.data)
    unpaired = manifest.model_copy(update={"settings": manifest.settings.model_copy(update={"pairs": "none"})})
    assert not list(Needy().data_faults(manifest))
    [fault] = Needy().data_faults(unpaired)
    assert fault == (
        'objective.name = "mlm": needs pairs, which the data has not; make the data with shard.py --pairs nsp'
    )


def test_a_plan_tells_of_the_objective(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DYNAMIC, "--objective.rate", "0.3", "--objective.next_sentences", "false"]
    train.main(["--recipe", str(plain), "--check", "--pieces-per-second", "1e6", *words])
    said = " ".join(capsys.readouterr().out.split())
    assert "- next sentences are left out: the model learns from masked pieces alone" in said
    assert "- masks are drawn anew in every epoch, a share of 0.3 of the pieces" in said
