"""The learning rate, as a pure function of the step, or of the seconds used where a run goes by the clock.

Conventions, where others differ by one: step k counts from 0. In a warm-up of w steps its learning rate is
peak * (k + 1) / w, so that no step has a learning rate of 0. Of T steps with decay it is
peak * shape((k - w) / (T - w)): step w has the peak, and the last step more than the final one. transformers'
schedules have k / w in the warm-up and the same decay. By the clock, seconds replace steps and the warm-up is
peak * seconds / warmup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pretraining.config.settings import WSD_SHARE, Recipe

Decay = Literal["linear", "polynomial", "cosine", "constant", "wsd"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate: a warm-up and a decay."""

    peak: float
    total: float
    """Length of the whole schedule, in steps, or in seconds by the clock."""
    warmup: float = 0.0
    """Length of the warm-up, in steps, or in seconds by the clock."""
    decay: Decay = "linear"
    power: float = 1.0
    """Exponent of the polynomial decay."""
    final: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    decay_share: float = WSD_SHARE
    """Share of the total in which the learning rate of `wsd` falls."""
    decay_from: Literal["warmup", "start"] = "warmup"
    """Begin of the decay."""
    by_clock: bool = False
    """Whether seconds count instead of steps."""

    def learning_rate(self, step: int, elapsed: float = 0.0) -> float:
        """The learning rate of a step, counted from 0, that begins `elapsed` seconds into the schedule."""
        now = elapsed if self.by_clock else step
        if now < self.warmup:
            return self.peak * (now if self.by_clock else step + 1) / self.warmup
        return self.peak * (self.final + (1 - self.final) * self._left(now))

    def _left(self, now: float) -> float:
        """The factor of the decay, from 1 to 0."""
        if self.decay == "constant":
            return 1.0
        begin = 0.0 if self.decay_from == "start" else self.warmup
        if self.decay == "wsd":
            falling = self.total * self.decay_share
            begin = max(self.warmup, self.total - (falling if self.by_clock else round(falling)))
        if now <= begin or now >= self.total:
            return float(now < self.total)
        progress = (now - begin) / (self.total - begin)
        if self.decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return math.pow(1 - progress, self.power if self.decay == "polynomial" else 1.0)


@dataclass(frozen=True)
class PhaseSchedule:
    """The part of a schedule in one phase; steps and seconds count from the beginning of the phase."""

    schedule: Schedule
    begin: float
    """Step or second of the schedule at which the phase begins."""
    length: float
    """Steps of the phase, or seconds."""

    @property
    def steps(self) -> int | None:
        """The steps of the phase; None by the clock."""
        return None if self.schedule.by_clock else int(self.length)

    def learning_rate(self, step: int, elapsed: float = 0.0) -> float:
        """The learning rate of a step of the phase that begins `elapsed` seconds into the phase."""
        if self.schedule.by_clock:
            return self.schedule.learning_rate(step, self.begin + elapsed)
        return self.schedule.learning_rate(int(self.begin) + step)

    def is_over(self, step: int, elapsed: float = 0.0) -> bool:
        """Whether the phase is over after these steps or, by the clock, seconds."""
        return (elapsed if self.schedule.by_clock else step) >= self.length


def build_schedules(recipe: Recipe) -> tuple[PhaseSchedule, ...]:
    """Builds the schedules of all phases; a phase without a learning rate continues that of the phase before."""
    seconds = recipe.phase_seconds()
    lengths = seconds if seconds is not None else recipe.phase_steps() or ()
    owners = recipe.schedule_owners()
    schedules = []
    for number, owner in enumerate(owners):
        phase = recipe.phases[owner]
        total = sum(length for length, its_owner in zip(lengths, owners, strict=True) if its_owner == owner)
        share = total * phase.warmup
        warmup = phase.warmup_steps if phase.warmup_steps is not None else share if seconds else round(share)
        decay = phase.model_dump(include={"decay", "power", "final", "decay_from"})
        if phase.decay_steps is not None:
            decay["decay_share"] = phase.decay_steps / max(total, 1)
        schedule = Schedule(phase.learning_rate or 0.0, total, warmup, by_clock=seconds is not None, **decay)
        schedules.append(PhaseSchedule(schedule, sum(lengths[owner:number]), lengths[number]))
    return tuple(schedules)
