"""The average sequences of a run, its remaining work, and a warning if it reads its text too often."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.common.progress import join_first
from data_prep.shards import Manifest
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Phase, Recipe
from pretraining.data.corpora import Corpora
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, configure_objective, count_step_flops, find_objective

HALF_WAY = 0.5
"""The share of a run at which the number of predictions is the average one, since it changes evenly."""
PREDICTED_SHARE = 0.15
"""The share of pieces that is masked and predicted, without data."""
_FLOPS: defaultdict[Shape, dict[int, float]] = defaultdict(dict)
"""Useful operations on a sequence, by the shape of the model and the size: many corpora have the same sizes."""


class SequenceStatistics(NamedTuple):
    """The average training sequence of one length, and how many of them the data has."""

    examples: float
    """The examples of a duplicate; 0 without data."""
    duplicates: int
    pieces: float
    """Real pieces of a sequence, without padding."""
    predictions: float
    """Masked pieces of a sequence."""
    flops: float
    """Useful operations on a sequence, forward and backward."""
    stored: int
    """The length of the examples in the shards; sequences of a shorter phase are cut out of them."""


def measure_sequences(
    shape: Shape, length: int, manifest: Manifest | None, objective: Objective | None = None, done: float = HALF_WAY
) -> SequenceStatistics:
    """Measures the sequences that a manifest counts; without one, full sequences are assumed.

    `objective` is that of a recipe, by default one with default settings. Its predictions are counted at the share
    `done` of the steps.
    """
    stored = (None if manifest is None else manifest.length_for(length)) or length
    figures = [] if manifest is None else manifest.figures
    sets = [shards for shards in figures if shards.length == stored and not shards.validation]
    counts, sizes, masked_share = np.array([1]), np.array([length]), PREDICTED_SHARE
    if examples := sum(shards.examples for shards in sets):
        counts = np.array([shards.histogram for shards in sets]).sum(0)
        sizes = np.minimum(np.arange(len(counts)), length)
        masked_share = sum(shards.masked for shards in sets) / sum(shards.pieces for shards in sets)
    predicted = (objective or find_objective(shape)).predictions(sizes, masked_share * sizes, done)
    flops, known = 0.0, _FLOPS[shape]
    for size, count in zip(sizes[counts > 0].tolist(), counts[counts > 0].tolist(), strict=True):
        known[size] = known.get(size) or count_step_flops(shape, [size], 0)
        flops += count * known[size]
    flops += count_step_flops(shape, [], 1) * float(np.dot(counts, predicted))
    sums = (int(np.dot(counts, sizes)), float(np.dot(counts, predicted)), flops)
    pieces, predictions, flops = (each / (examples or 1) for each in sums)
    return SequenceStatistics(examples / max(len(sets), 1), len(sets), pieces, predictions, flops, stored)


def most_predictions(objective: Objective, length: int, manifest: Manifest | None) -> int:
    """Returns the most pieces that a sequence of this length predicts, at any step of a run."""
    masked = math.ceil(PREDICTED_SHARE * length)
    if manifest is not None and (stored := manifest.length_for(length)) is not None:
        settings = manifest.settings
        most = settings.max_predictions[settings.lengths.index(stored)]
        masked = min(most, max(1, round(stored * settings.mask_rate)), length - 3)
    return objective.most_predictions(length, masked)


class RemainingWork:
    """The remaining operations of a run or, by the clock, its remaining seconds."""

    def __init__(self, recipe: Recipe, corpora: Corpora) -> None:
        self._schedules = build_schedules(recipe)
        self._flops = [phase.batch * measure_phase(recipe, phase, corpora).flops for phase in recipe.phases]
        """operations of a step of every phase"""

    @property
    def total_steps(self) -> int:
        """Steps of all phases; 0 by the clock."""
        return sum(schedule.steps or 0 for schedule in self._schedules)

    def estimate(self, phase: int, phase_step: int, phase_seconds: float) -> tuple[float | None, float | None]:
        """Estimates the operations or, by the clock, the seconds that are left; the other one is None."""
        this, *later = [schedule.length for schedule in self._schedules[phase:]] or [0]
        if not self.total_steps:
            return None, max(0.0, this - phase_seconds) + sum(later)
        return sum(map(operator.mul, [this - phase_step, *later], self._flops[phase:])), None


USUAL_EPOCHS = 40
"""How often BERT read its text (Devlin et al. 2019, A.2); beyond that, more steps on the same text hardly
help a language model (Muennighoff et al. 2023)."""
MOST_EPOCHS = 100
"""Number of epochs without a warning: more than any published BERT has."""


def warn_of_disproportion(recipe: Recipe, corpora: Corpora | None, steps: Sequence[float | None]) -> str | None:
    """Returns a warning if these steps read the text, or that of a named corpus, too often; None if they do not, or if
    unknown."""
    epochs, counts = dict[str, float](), [count for count in steps if count is not None]
    if corpora is None or len(counts) < len(recipe.phases):
        return None
    for count, phase in zip(counts, recipe.phases, strict=True):
        mixture = phase.mixture(corpora)
        for name, share, examples in zip(mixture.names, mixture.mean, mixture.examples, strict=True):
            epochs[name] = epochs.get(name, 0.0) + share * (count * phase.batch / examples)
    over = sorted(((times, name) for name, times in epochs.items() if times > MOST_EPOCHS), reverse=True)
    if not over:
        return None
    told = join_first([f"{f'of {name} ' * bool(name)}is read {times:,.0f} times" for times, name in over])
    share = f"{100 * USUAL_EPOCHS / over[0][0]:.2g}%"
    fewer = f"{share} of the steps, smaller batches (--phases.N.batch)"
    cure = f"{share} of {over[0][1]}'s share in phases.N.mix" if len(over) < len(corpora.parts) else fewer
    return f"the text {told}; BERT read its own {USUAL_EPOCHS} times\nfor so much text: {cure}, or more text"


def describe_mixtures(recipe: Recipe, corpora: Corpora, steps: Sequence[float | None]) -> Iterator[str]:
    """Describes what each phase of so many steps reads of named corpora: shares and, where the steps are known, epochs
    so far."""
    epochs = dict[str, float]()
    for count, phase in zip(steps, recipe.phases, strict=False):
        mixture = phase.mixture(corpora)
        sequences = mixture.mean * phase.batch * (count or 1)
        for name, own in zip(mixture.names, sequences / mixture.examples, strict=True):
            epochs[name] = epochs.get(name, 0.0) + own
        known = None if count is None else np.array([epochs[name] for name in mixture.names])
        yield f"phase {phase.name} reads {mixture.describe(sequences, known)}"


def measure_phase(recipe: Recipe, phase: Phase, corpora: Corpora | None) -> SequenceStatistics:
    """Measures the average sequence of a phase, with the predictions in the middle of the phase. Of several corpora,
    the examples are those of all that the phase reads, and the other figures are means by its shares."""
    own = recipe.in_phase(phase)
    objective, done = configure_objective(own.objective), find_middle(recipe, phase)
    if corpora is None:
        return measure_sequences(own.shape(None), phase.length, None, objective, done)
    mixture, shape = phase.mixture(corpora), own.shape(corpora.common)
    parts = [measure_sequences(shape, phase.length, part.manifest, objective, done) for part in mixture.corpora.parts]
    figures = np.array([(part.pieces, part.predictions, part.flops) for part in parts])
    pieces, predictions, flops = (mixture.mean @ figures).tolist()
    examples, duplicates = sum(part.examples for part in parts), max(part.duplicates for part in parts)
    return SequenceStatistics(examples, duplicates, pieces, predictions, flops, parts[0].stored)


def find_middle(recipe: Recipe, phase: Phase) -> float:
    """Finds the share of the run's steps with its objective that is done in the middle of a phase; by the clock, one
    half."""
    number = [each.name for each in recipe.phases].index(phase.name)
    steps, (before, total) = recipe.phase_steps(), recipe.objective_steps(number) or (0, 0)
    if steps is None or not total:
        return HALF_WAY
    return (before + max(steps[number] - 1, 0) / 2) / max(total - 1, 1)
