"""Averages over the sequences of a length, for plans and FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from data_prep.shards import Manifest
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, count_step_flops, find_objective

HALF_WAY = 0.5
"""The share of a run at which the number of predictions is the average one, since it changes evenly."""
PREDICTED_SHARE = 0.15
"""The share of pieces that is masked and predicted, without data."""


@dataclass(frozen=True)
class SequenceStatistics:
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
    examples = sum(shards.examples for shards in sets)
    objective, flops_of_prediction = objective or find_objective(shape), count_step_flops(shape, [], 1)
    if not examples:
        predictions = objective.predictions(length, PREDICTED_SHARE * length, done)
        flops = count_step_flops(shape, [length], 0) + flops_of_prediction * predictions
        return SequenceStatistics(0.0, 0, length, predictions, flops, stored)
    counts = [sum(column) for column in zip(*(shards.histogram for shards in sets), strict=True)]
    sizes = np.minimum(np.arange(len(counts)), length)
    pieces = int(np.dot(counts, sizes))
    masked_share = sum(shards.masked for shards in sets) / sum(shards.pieces for shards in sets)
    predictions = float(np.dot(counts, objective.predictions(sizes, masked_share * sizes, done)))
    flops = sum(count * count_step_flops(shape, [min(size, length)], 0) for size, count in enumerate(counts) if count)
    return SequenceStatistics(
        examples=examples / len(sets),
        duplicates=len(sets),
        pieces=pieces / examples,
        predictions=predictions / examples,
        flops=(flops + flops_of_prediction * predictions) / examples,
        stored=stored,
    )


def most_predictions(objective: Objective, length: int, manifest: Manifest | None) -> int:
    """Returns the most pieces that a sequence of this length predicts, at any step of a run."""
    masked = _most_masked(length, manifest)
    return max(int(objective.predictions(length, masked, done)) for done in (0.0, 1.0))


def _most_masked(length: int, manifest: Manifest | None) -> int:
    stored = None if manifest is None else manifest.length_for(length)
    if manifest is None or stored is None:
        return math.ceil(PREDICTED_SHARE * length)
    settings = manifest.settings
    most = settings.max_predictions[settings.lengths.index(stored)]
    likely = max(1, round(stored * settings.mask_rate))
    return min(most, likely, length - 3)
