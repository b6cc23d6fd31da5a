"""What a recipe takes over from its base model, and what it may not have otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recipes import PLAIN, faults

from data_prep.common.errors import UserError
from pretraining.config.overrides import load_recipe
from pretraining.model.shape import Shape

SHAPE = Shape(3, 96, 4, 200, 1000, positions=600, segments=3, dropout=0.2, attention_dropout=0.3, epsilon=1e-5)
PHASES = PLAIN[PLAIN.index("[[phases]]") :]


def find_shape(name: str) -> Shape:
    if name != "bert":
        raise UserError(f"{name}: no such folder")
    return SHAPE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(PHASES)
    return tmp_path / "recipe.toml"


def test_a_recipe_without_sizes_has_all_of_the_base_model(path: Path) -> None:
    recipe = load_recipe(path, ["--base_model", "bert"], find_shape=find_shape)
    assert recipe.model.shape(1000) == SHAPE
    assert recipe.base_model == "bert"
    kept = path.with_name("kept.toml")
    kept.write_text(recipe.as_toml())
    assert load_recipe(kept, find_shape=find_shape) == recipe == load_recipe(kept)


def test_dropout_is_the_recipe_s_own_and_more_positions_may_be_given(path: Path) -> None:
    path.write_text(f'base_model = "bert"\n[model]\ndropout = 0.0\npositions = 700\nhidden = 96\n{PHASES}')
    shape = load_recipe(path, find_shape=find_shape).model.shape(1000)
    assert (shape.dropout, shape.attention_dropout, shape.positions, shape.hidden) == (0.0, 0.3, 700, 96)


def test_other_sizes_are_refused_by_name(path: Path) -> None:
    words = ["--model.hidden", "64", "--model.epsilon", "1e-12", "--model.positions", "512", "--model.size", "tiny"]
    assert faults(path, "--base_model", "bert", *words, find_shape=find_shape) == [
        "--model.hidden = 64: bert has 96; leave it out (see --recipe adapt)",
        "--model.positions = 512: bert has 600; leave it out, or give more, which begin anew",
        "--model.epsilon = 1e-12: bert has 1e-05; leave it out (see --recipe adapt)",
        '--model.size = "tiny": 2 layers of 128, but bert has 3 layers of 96; leave it out (see --recipe adapt)',
    ]
    path.write_text(f'base_model = "bert"\n[model]\nlayers = 2\n{PHASES}')
    assert faults(path, find_shape=find_shape) == [
        f"{path}: model.layers = 2: bert has 3; leave it out (see --recipe adapt)"
    ]


def test_a_base_model_that_is_not_there_is_told_with_all_else(path: Path) -> None:
    found = faults(path, "--base_model", "bart", "--phases.0.batch", "-1", find_shape=find_shape)
    assert sorted(found) == ["--init bart: no such folder", "--phases.0.batch = -1: at least 1"]
    path.write_text(f'base_model = "bart"\n{PHASES}')
    assert faults(path, find_shape=find_shape) == [f"{path}: base_model bart: no such folder"]


def test_other_faults_of_the_model_are_told_as_ever(path: Path) -> None:
    for words, message in ((("bert", "--model.layers", "x"), "a whole number is needed"), (("3",), "a text is needed")):
        assert message in faults(path, "--base_model", *words, find_shape=find_shape)[0]
