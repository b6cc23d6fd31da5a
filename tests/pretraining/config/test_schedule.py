"""The learning rate, against transformers' schedules and the formulas of the recipes' sources."""

import math
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.overrides import load_recipe
from pretraining.config.schedule import Schedule, build_schedules
from pretraining.config.settings import Recipe

RECIPES = ROOT / "pretraining/recipes"
DECAYS = ["linear", "polynomial", "cosine", "constant", "wsd"]


def theirs(name: str, steps: int, peak: float, **options: Any) -> list[float]:
    """The rates of one of transformers' schedules."""
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = getattr(transformers, f"get_{name}")(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


STEPS = {"num_training_steps": 40}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("name", "ours", "options"),
    [
        ("linear_schedule_with_warmup", {}, STEPS),
        ("cosine_schedule_with_warmup", {"decay": "cosine"}, STEPS),
        ("constant_schedule_with_warmup", {"decay": "constant"}, {}),
        ("wsd_schedule", {"decay": "wsd", "decay_share": 0.25}, {**STEPS, "num_decay_steps": 10, "min_lr_ratio": 0.1}),
        ("polynomial_decay_schedule_with_warmup", {"decay": "polynomial"}, {**STEPS, "power": 0.5, "lr_end": 1e-4}),
    ],
)
def test_rates_are_those_of_transformers(name: str, ours: Any, options: dict[str, Any], warmup: int) -> None:
    """In the decay step for step; in the warm-up one step ahead, since theirs begins with a step at 0."""
    more: dict[str, Any] = {"power": 0.5, "final": 0.1} if options.keys() - STEPS.keys() else {}
    schedule = Schedule(1e-3, 40, warmup=warmup, **ours, **more)
    options |= {"decay_type": "linear"} if name == "wsd_schedule" else {}
    rates = theirs(name, 41, 1e-3, num_warmup_steps=warmup, **options)
    assert [schedule.learning_rate(step) for step in range(warmup, 41)] == pytest.approx(rates[warmup:])
    if "min_lr_ratio" not in options:  # at which theirs begins
        assert [schedule.learning_rate(step) for step in range(warmup)] == pytest.approx(rates[1 : warmup + 1])


def test_the_paper_has_one_schedule_for_both_phases() -> None:
    """google-research/bert: linear from the first step, the warm-up in place of its first 10,000."""
    recipe = load_recipe(RECIPES / "bert_base_adam.toml")
    assert [(phase.length, phase.batch) for phase in recipe.phases] == [(128, 256), (512, 256)]
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    short, long = build_schedules(recipe)
    assert (short.steps, long.steps) == (900_000, 100_000)
    for step in (0, 1, 9_998):
        assert short.learning_rate(step) == pytest.approx(1e-4 * (step + 1) / 10_000)
    for step in (10_000, 500_000, 899_999):
        assert short.learning_rate(step) == pytest.approx(1e-4 * (1 - step / 1_000_000))
    for step in (0, 50_000, 99_999):
        assert long.learning_rate(step) == pytest.approx(1e-4 * (1 - (900_000 + step) / 1_000_000))


def test_nvidia_begins_anew_with_each_phase() -> None:
    """DeepLearningExamples, PolyWarmUpScheduler: the square root of what is left of all steps, after the warm-up."""
    recipe = load_recipe(RECIPES / "bert_large_lamb.toml")
    assert [(phase.length, phase.batch) for phase in recipe.phases] == [(128, 65536), (512, 32768)]
    assert (recipe.optimizer.name, recipe.optimizer.clip) == ("lamb", 1.0)
    numbers = [(7038, 6e-3, 0.2843), (1563, 4e-3, 0.128)]
    for schedule, (steps, rate, warmup) in zip(build_schedules(recipe), numbers, strict=True):
        assert schedule.steps == steps
        last = round(steps * warmup)
        assert schedule.learning_rate(0) == pytest.approx(rate / last)
        assert schedule.learning_rate(last - 1) == pytest.approx(rate)
        for step in (last, last + 100, steps - 1):
            assert schedule.learning_rate(step) == pytest.approx(rate * (1 - step / steps) ** 0.5)


def test_the_budget_goes_by_the_clock() -> None:
    [schedule] = build_schedules(load_recipe(RECIPES / "bert_large_budget.toml"))
    day = 24 * 3600
    assert schedule.steps is None
    assert schedule.learning_rate(3, elapsed=0.03 * day) == pytest.approx(0.5e-3)
    assert schedule.learning_rate(10**9, elapsed=0.06 * day) == pytest.approx(1e-3)
    assert schedule.learning_rate(0, elapsed=0.53 * day) == pytest.approx(0.5e-3)
    assert schedule.learning_rate(0, elapsed=day) == schedule.learning_rate(0, elapsed=2 * day) == 0.0
    assert not schedule.is_over(10**9, elapsed=day - 1)
    assert schedule.is_over(0, elapsed=day)


def recipe(**changes: Any) -> Recipe:
    phase = {"name": "a", "length": 128, "batch": 8, "micro_batch": 8, "learning_rate": 1.0}
    phases = [{**phase, "share": 0.7, "warmup": 0.1}, {**phase, "name": "b", "share": 0.3, "learning_rate": None}]
    return Recipe.model_validate({"phases": phases, "model": {"size": "tiny"}, **changes})


@given(st.integers(1, 10**6))
def test_shares_of_the_steps_make_all_of_them(steps: int) -> None:
    counts = recipe(steps=steps).phase_steps()
    assert counts is not None
    assert sum(counts) == steps


def test_a_phase_by_the_clock_goes_on_where_the_one_before_ended() -> None:
    first, second = build_schedules(recipe(hours=1.0))
    assert (first.length, second.begin) == (2520.0, 2520.0)
    end, begin, later = (one.learning_rate(0, at) for one, at in ((first, 2520.0), (second, 0.0), (second, 60.0)))
    assert end == begin > later


@given(st.integers(1, 10**6), st.floats(0, 0.5), st.floats(0, 0.4), st.data())
def test_a_stable_run_can_decay_from_any_step(total: int, share: float, fall: float, draw: st.DataObject) -> None:
    """`wsd` is `constant` until it falls, and from there on a phase of its own that begins at the same rate."""
    warmup, falling = int(share * total), int(fall * total)
    phase = {"name": "a", "length": 128, "batch": 8, "micro_batch": 8, "steps": total, "learning_rate": 2e-3}
    phase |= {"warmup_steps": warmup, "decay": "wsd", "decay_steps": falling}
    [whole] = build_schedules(Recipe.model_validate({"phases": [phase]}))
    stable, decay = Schedule(2e-3, 10**9, warmup, "constant"), Schedule(2e-3, falling)
    step = draw.draw(st.integers(0, total - 1))
    parts = stable.learning_rate(step) if step < total - falling else decay.learning_rate(step - total + falling)
    assert whole.learning_rate(step) == parts


SHARES = st.tuples(st.floats(0, 0.99), st.floats(0, 1), st.floats(0.01, 1))


@given(st.sampled_from(DECAYS), st.sampled_from(["warmup", "start"]), st.integers(1, 300), SHARES, st.booleans())
def test_a_rate_stays_between_nothing_and_its_peak(
    decay: Any, decay_from: Any, total: int, shares: tuple[float, float, float], by_clock: bool
) -> None:
    share, final, decay_share = shares
    warmup = share * total if by_clock else int(share * total)
    falls = {"power": 0.5, "final": final, "decay_share": decay_share, "decay_from": decay_from}
    schedule = Schedule(2.0, total, warmup=warmup, decay=decay, by_clock=by_clock, **falls)
    rates = [schedule.learning_rate(step, elapsed=float(step)) for step in range(total + 3)]
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in rates)
    assert rates == [schedule.learning_rate(step, elapsed=float(step)) for step in range(total + 3)]
    after = rates[math.ceil(warmup) : total]
    assert after == sorted(after, reverse=True)
    assert all(rate > 0 for rate in after)
    assert rates[total] == pytest.approx(2.0 if decay == "constant" else 2.0 * final)
    if not by_clock:
        assert all(rate > 0 for rate in rates[:total]), "no step is lost"
