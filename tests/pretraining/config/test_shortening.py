"""A shortened recipe has the same schedules in fewer steps, and can be trained."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.commands import assert_refusal
from support.training import PLAIN

from data_prep.common.toml_text import read_toml
from pretraining.config.conflicts import find_faults
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Recipe
from pretraining.config.shortening import shorten_recipe, suggest_share

ALL = sorted(path for path in RECIPES.glob("*.toml") if "size =" in path.read_text())  # not those for any base model
WSD = 'warmup_steps = 70\ndecay = "wsd"\ndecay_steps = 50'


def make_recipe(steps: tuple[int, int], schedule: str) -> Recipe:
    text = PLAIN.replace("steps = 100", f"steps = {steps[0]}").replace("steps = 20", f"steps = {steps[1]}")
    return Recipe.model_validate(read_toml(text.replace("warmup = 0.1", schedule)))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_schedules_keep_their_shape(path: Path) -> None:
    """A step of a twentieth has a learning rate of the 20 steps of the recipe that it stands for, or of those beside
    them."""
    recipe = load_recipe(path)
    short = shorten_recipe(recipe, 0.05)
    assert short.evaluation == recipe.evaluation
    for then, now in zip(build_schedules(recipe), build_schedules(short), strict=True):
        assert now.length == pytest.approx(0.05 * then.length, rel=0.02)
        for step in range(0, int(now.length), 1 + int(now.length) // 97):
            places = range(max(0, 20 * step - 20), min(20 * step + 40, int(then.length)))
            around = [then.learning_rate(at, at) for at in places]
            assert min(around) <= now.learning_rate(step, step) <= max(around)


@given(st.floats(1e-9, 1), st.integers(61, 5000), st.integers(61, 5000), st.sampled_from(["warmup = 0.1", WSD]))
@example(1e-9, 61, 61, WSD)
@example(0.0251, 61, 61, WSD)
def test_no_phase_loses_its_last_step_and_no_schedule_its_place(share: float, one: int, two: int, text: str) -> None:
    recipe = make_recipe((one, two), text)
    assert not find_faults(recipe)
    short = shorten_recipe(recipe, share)
    assert min(short.phase_steps() or ()) >= 1
    assert not find_faults(short)
    assert Recipe.model_validate(read_toml(short.as_toml())) == short, "as the run stores it"


def test_shares_of_all_steps_get_one_each() -> None:
    recipe = load_recipe(RECIPES / "bert_base_adam.toml", ["--checkpoints.keep_at", "[100000,100001,900000]"])
    for share in (0.05, 1e-6):
        short = shorten_recipe(recipe, share)
        assert min(short.phase_steps() or ()) >= 1
        assert not find_faults(short)
    assert shorten_recipe(recipe, 0.05).phase_steps() == (45_000, 5_000)
    assert shorten_recipe(recipe, 0.05).checkpoints.keep_at == (5_000, 45_000)
    ends = load_recipe(
        RECIPES / "demo.toml", ["--phases.0.steps=29", "--phases.1.steps=29", "--checkpoints.keep_at=[29,58]"]
    )
    assert shorten_recipe(ends, 0.05).checkpoints.keep_at == (1, 2), "which are the ends of the phases again"
    averaged = load_recipe(RECIPES / "bert_mini.toml", ["--checkpoints.average", "3"])
    assert shorten_recipe(averaged, 0.05).checkpoints.every == 25, "there are as many to average"


def test_a_phase_with_a_tiny_share_makes_no_run_longer_than_wanted() -> None:
    shares = [
        "--steps=100000",
        "--phases.0.steps=",
        "--phases.1.steps=",
        "--phases.0.share=0.999",
        "--phases.1.share=0.001",
    ]
    recipe = load_recipe(RECIPES / "demo.toml", shares)
    assert shorten_recipe(recipe, 0.004).phase_steps() == (500, 1)
    assert_refusal("--shorten 0.001: phase long has no step among fewer than 501 steps", shorten_recipe, recipe, 0.001)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_run_that_was_shortened_is_recognised(path: Path) -> None:
    recipe = load_recipe(path)
    short = shorten_recipe(recipe, 0.05)
    assert "--shorten 0.05 missing" in suggest_share(recipe, short)
    assert suggest_share(recipe, recipe) == suggest_share(short, recipe) == ""
    if len(recipe.phases) > 1:
        other = recipe.model_copy(update={"phases": (short.phases[0], *recipe.phases[1:])})
        assert suggest_share(recipe, other) == ""
