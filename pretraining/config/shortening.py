"""Shortens a recipe to a share of its length: the same phases and schedules in less time."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from data_prep.common.errors import UserError
from pretraining.config.settings import Recipe


def check_share(share: float, recipe: Path, own: Path | None) -> None:
    """Raises UserError unless this recipe can be shortened to a share; `own` is the one that the run has stored, with
    the steps that it trains."""
    if not 0 < share <= 1:  # nor NaN
        raise UserError(f"--shorten {share:g}: give a share above 0 and up to 1, such as 0.05")
    if share < 1 and own is not None and recipe.resolve() == own.resolve():
        raise UserError(f"--shorten {share:g}: {recipe} has the steps of this run already; leave --shorten out")


def shorten_recipe(recipe: Recipe, share: float) -> Recipe:
    """Returns a recipe with a share of the steps or hours of every phase, at least one step each.

    Warm-ups and decays in steps keep their share of the schedule, rounded down, so that they still fit into it. The
    checkpoints to keep, the interval of those to average, and that of logging shrink too. Other intervals do not: the
    time of an evaluation, and the work that a fault loses, are the same in a short run.

    Raises UserError if a phase has so small a share of all steps that it needs more than twice the steps to have one.
    """

    def scale(count: int) -> int:
        return max(1, round(count * share))

    raw, before = recipe.as_dict(), recipe.phase_steps()
    for phase in raw["phases"]:
        if "steps" in phase:
            phase["steps"] = scale(phase["steps"])
    if recipe.hours is not None:
        raw["hours"] = float(f"{recipe.hours * share:.6g}")
    if recipe.steps is not None:
        totals = range(scale(recipe.steps), recipe.steps + 1)
        raw["steps"] = next(t for t in totals if all(recipe.model_copy(update={"steps": t}).phase_steps() or ()))
        if raw["steps"] > 2 * totals[0]:
            rare = min(recipe.phases, key=lambda phase: phase.share or 0.0).name
            raise UserError(f"--shorten {share:g}: phase {rare} has no step among fewer than {raw['steps']:,} steps")
    after = Recipe.model_validate(raw).phase_steps()
    if before and after:
        _shorten_schedules(recipe, raw["phases"], before, after)
    raw["logging"]["every"] = scale(recipe.logging.every)
    if recipe.checkpoints.average and recipe.checkpoints.every:
        raw["checkpoints"]["every"] = scale(recipe.checkpoints.every)
    if recipe.checkpoints.keep_at:
        ends = dict(zip(accumulate(before or ()), accumulate(after or ()), strict=True))  # remain ends of phases
        raw["checkpoints"]["keep_at"] = sorted({ends.get(step, scale(step)) for step in recipe.checkpoints.keep_at})
    return Recipe.model_validate(raw)


def suggest_share(recipe: Recipe, short: Recipe) -> str:
    """Asks in a line for --shorten if another recipe has one share, to two digits, of the length of every phase."""
    lengths = (each.phase_steps() or each.phase_seconds() or () for each in (recipe, short))
    shares = {float(f"{now / then:.2g}") for then, now in zip(*lengths, strict=False)}
    return f"all phases were shorter: is --shorten {min(shares)} missing?\n" if len(shares) == 1 > min(shares) else ""


def _shorten_schedules(
    recipe: Recipe, phases: list[dict[str, int]], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """Shortens warm-ups and decays that are given in steps, from the steps of the phases `before` to those `after`."""
    owners = recipe.schedule_owners()
    for number, phase in enumerate(phases):
        spanned = [follower for follower, owner in enumerate(owners) if owner == number]
        then, now = (sum(steps[follower] for follower in spanned) for steps in (before, after))
        for name in ("warmup_steps", "decay_steps"):
            if phase.get(name):
                phase[name] = min(max(1, phase[name] * now // then), now - 1)
