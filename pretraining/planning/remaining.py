"""What a run still has to do, for the time left that it tells."""

from __future__ import annotations

from data_prep.shards import Manifest
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Recipe
from pretraining.data.statistics import measure_sequences


class RemainingWork:
    """How much of a run is left, from where it stands."""

    def __init__(self, recipe: Recipe, manifest: Manifest) -> None:
        shape = recipe.shape(manifest)
        self._schedules = build_schedules(recipe)
        self._flops = [phase.batch * measure_sequences(shape, phase.length, manifest).flops for phase in recipe.phases]
        """operations of a step of every phase"""

    @property
    def total_steps(self) -> int:
        """The steps of all phases; 0 where the clock decides."""
        return sum(schedule.steps or 0 for schedule in self._schedules)

    def flops(self, phase: int, phase_step: int) -> float | None:
        """The operations that are left; None where the clock decides."""
        total = 0.0
        for number in range(phase, len(self._schedules)):
            steps = self._schedules[number].steps
            if steps is None:
                return None
            total += (steps - (phase_step if number == phase else 0)) * self._flops[number]
        return total

    def seconds(self, phase: int, phase_seconds: float) -> float | None:
        """The seconds that are left where the clock decides; None where steps do."""
        if any(schedule.steps is not None for schedule in self._schedules):
            return None
        this, *later = (schedule.length for schedule in self._schedules[phase:])
        return max(0.0, this - phase_seconds) + sum(later)
