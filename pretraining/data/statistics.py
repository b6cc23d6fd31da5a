"""What the sequences of a length are like on average: plans and FLOPs rest on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data_prep.shards import Manifest
from pretraining.model.shape import Shape

PREDICTED_SHARE = 0.15
"""The share of the pieces that is masked and predicted, where no data says it."""


@dataclass(frozen=True)
class SequenceStatistics:
    """The average training sequence of one length, and how many of them the data has."""

    examples: float
    """Examples of a duplicate; 0 where there is no data."""
    duplicates: int
    pieces: float
    """Real pieces of a sequence, without padding."""
    predictions: float
    """Masked pieces of a sequence."""
    flops: float
    """Useful operations on a sequence, forward and backward."""


def measure_sequences(shape: Shape, length: int, manifest: Manifest | None) -> SequenceStatistics:
    """Measures the sequences that a manifest counts; without one, full sequences are assumed."""
    content = [] if manifest is None else manifest.content["sets"]
    sets = [shards for shards in content if shards["length"] == length and not shards["validation"]]
    examples = sum(shards["examples"] for shards in sets)
    flops_of_prediction = shape.flops([], 1)
    if not examples:
        predictions = PREDICTED_SHARE * length
        flops = shape.flops([length], 0) + flops_of_prediction * predictions
        return SequenceStatistics(0.0, 0, length, predictions, flops)
    counts = [sum(column) for column in zip(*(shards["histogram"] for shards in sets), strict=True)]
    predictions = sum(shards["masked"] for shards in sets)
    flops = sum(count * shape.flops([size], 0) for size, count in enumerate(counts) if count)
    return SequenceStatistics(
        examples=examples / len(sets),
        duplicates=len(sets),
        pieces=sum(shards["pieces"] for shards in sets) / examples,
        predictions=predictions / examples,
        flops=(flops + flops_of_prediction * predictions) / examples,
    )


def most_predictions(length: int, manifest: Manifest | None) -> int:
    """The most masked pieces that a sequence of this length has."""
    settings = {} if manifest is None else manifest.content["settings"]
    if length not in settings.get("lengths", ()):
        return math.ceil(PREDICTED_SHARE * length)
    most = settings["max_predictions"][settings["lengths"].index(length)]
    return int(min(most, max(1, round(length * settings["mask_rate"]))))
