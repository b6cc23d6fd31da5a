"""What the shards hold on average: for plans, FLOPs and model cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_prep.shards import Manifest
from pretraining.model.shape import Shape


def summarise_data(manifest: Manifest) -> dict[str, Any]:
    """What a model card says of a folder of shards; a run keeps it with its checkpoints."""
    content = manifest.content
    examples: dict[str, int] = {}
    for shards in content["sets"]:
        name = str(shards["length"]) + (", held out" if shards["validation"] else "")
        examples[name] = examples.get(name, 0) + shards["examples"]
    settings = content["settings"]
    return {
        "sources": content["corpus"]["documents_by_source"],
        "pieces": content["corpus"]["pieces"],
        "examples": examples,
        "settings": {
            name: settings[name] for name in ("language", "cased", "duplicates", "masking", "mask_rate", "pairs")
        },
        "vocabulary": content["vocabulary"]["sha256"],
        "fingerprint": manifest.fingerprint,
    }


PREDICTED = 0.15
"""share of the pieces that is predicted, where there is no data"""


@dataclass(frozen=True)
class Text:
    """What a sequence of a length is on average."""

    examples: float
    """of one duplicate; 0 where there is no data"""
    duplicates: int
    pieces: float
    """of a sequence, real"""
    predictions: float
    flops: float
    """of a sequence, forward and backward"""


def measure_text(shape: Shape, length: int, manifest: Manifest | None) -> Text:
    """From the counts of the manifest; without one, full sequences."""
    sets = [] if manifest is None else [each for each in manifest.content["sets"] if _trains(each, length)]
    examples = sum(each["examples"] for each in sets)
    if not examples:
        predictions = PREDICTED * length
        flops = shape.flops([length], 0) + shape.flops([], 1) * predictions
        return Text(0.0, 0, length, predictions, flops)
    counts = [sum(column) for column in zip(*(each["histogram"] for each in sets), strict=True)]
    predictions = sum(each["masked"] for each in sets)
    flops = sum(count * shape.flops([size], 0) for size, count in enumerate(counts) if count)
    return Text(
        examples=examples / len(sets),
        duplicates=len(sets),
        pieces=sum(each["pieces"] for each in sets) / examples,
        predictions=predictions / examples,
        flops=(flops + shape.flops([], 1) * predictions) / examples,
    )


def _trains(content: dict[str, Any], length: int) -> bool:
    return bool(content["length"] == length and not content["validation"])
