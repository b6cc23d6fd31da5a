"""The remaining work of a run, and a warning if it reads its text too often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data_prep.shards import Manifest
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Phase, Recipe
from pretraining.data.statistics import HALF_WAY, SequenceStatistics, measure_sequences
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import configure_objective


class RemainingWork:
    """The remaining operations or seconds of a run."""

    def __init__(self, recipe: Recipe, manifest: Manifest) -> None:
        self._schedules = build_schedules(recipe)
        self._flops = [
            phase.batch * text.flops for phase, text in zip(recipe.phases, _measure_all(recipe, manifest), strict=True)
        ]
        """operations of a step of every phase"""

    @property
    def total_steps(self) -> int:
        """Steps of all phases; 0 by the clock."""
        return sum(schedule.steps or 0 for schedule in self._schedules)

    def flops(self, phase: int, phase_step: int) -> float | None:
        """Counts the remaining operations; None by the clock."""
        total = 0.0
        for number in range(phase, len(self._schedules)):
            steps = self._schedules[number].steps
            if steps is None:
                return None
            total += (steps - (phase_step if number == phase else 0)) * self._flops[number]
        return total

    def seconds(self, phase: int, phase_seconds: float) -> float | None:
        """Counts the remaining seconds by the clock; None if steps are given."""
        if any(schedule.steps is not None for schedule in self._schedules):
            return None
        this, *later = (schedule.length for schedule in self._schedules[phase:])
        return max(0.0, this - phase_seconds) + sum(later)


USUAL_EPOCHS = 40
"""How often BERT read its text (Devlin et al. 2019, A.2); beyond that, more steps on the same text hardly
help a language model (Muennighoff et al. 2023)."""
MOST_EPOCHS = 100
"""Number of epochs without a warning: more than any published BERT has."""
FEW_STEPS = 100
"""A phase of fewer steps has hardly left its warm-up."""


def warn_of_disproportion(recipe: Recipe, manifest: Manifest | None, steps: Sequence[float | None]) -> str | None:
    """Returns a warning if these steps read the text too often, with better options; None if they do not,
    or if unknown."""
    if manifest is None:
        return None
    texts = _measure_all(recipe, manifest)
    if not all(text.examples for text in texts) or None in steps:
        return None
    planned = [count or 0.0 for count in steps]
    epochs = sum(
        count * phase.batch / text.examples for count, phase, text in zip(planned, recipe.phases, texts, strict=True)
    )
    if epochs <= MOST_EPOCHS:
        return None
    share, duplicates = USUAL_EPOCHS / epochs, texts[0].duplicates
    each = f", each of its {duplicates} duplicates {epochs / duplicates:,.0f} times" if duplicates > 1 else ""
    said = f"the text is read {epochs:,.0f} times{each}; BERT read its own {USUAL_EPOCHS} times\n"
    if min(planned) * share < 1:
        return said + "for so much text: smaller batches (--phases.N.batch), or more text for such batches"
    few = min(count * share for count in planned) < FEW_STEPS
    smaller = "\nso few steps teach little: take smaller batches too (--phases.N.batch), or more text" if few else ""
    return f"{said}for so much text: {' '.join(_list_options(recipe, planned, share))}{smaller}"


def _measure_all(recipe: Recipe, manifest: Manifest) -> list[SequenceStatistics]:
    """Measures the average sequences of all phases."""
    shape = recipe.shape(manifest)
    return [measure_phase(recipe, phase, shape, manifest) for phase in recipe.phases]


def measure_phase(recipe: Recipe, phase: Phase, shape: Shape, manifest: Manifest | None) -> SequenceStatistics:
    """Measures the average sequence of a phase, with the predictions in the middle of the phase."""
    objective, done = configure_objective(recipe.objective), find_middle(recipe, phase)
    return measure_sequences(shape, phase.length, manifest, objective, done)


def find_middle(recipe: Recipe, phase: Phase) -> float:
    """Finds the share of the run's steps that is done in the middle of a phase; by the clock, one half."""
    steps, names = recipe.phase_steps() or (), [each.name for each in recipe.phases]
    if not sum(steps):
        return HALF_WAY
    number = names.index(phase.name)
    return (sum(steps[:number]) + max(steps[number] - 1, 0) / 2) / max(sum(steps) - 1, 1)


def _list_options(recipe: Recipe, steps: Sequence[float], share: float) -> Iterator[str]:
    """Lists the options for this share of the steps, or of the hours, in every phase."""
    if recipe.hours is not None:
        yield f"--hours {recipe.hours * share:.2g}"
    elif recipe.steps is not None:
        yield f"--steps {_round(recipe.steps * share)}"
    else:
        yield from (f"--phases.{number}.steps {_round(count * share)}" for number, count in enumerate(steps))


def _round(steps: float) -> int:
    """Rounds to two digits, and to at least one step."""
    return max(1, int(float(f"{steps:.2g}")))
