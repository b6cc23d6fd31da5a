"""Reads some training examples for the page of a folder, with their masks and sources."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.common.errors import DamageError
from data_prep.inspection import lookup
from data_prep.shards import Manifest
from data_prep.vocabulary.vocabulary import Vocabulary

SHOWN = 10
MOST_EXAMPLES = 5000
"""Examples whose sources are looked up: shards are shuffled over the corpus, so the first are like all others."""
MOST_DOCUMENTS = 2_000_000
"""Rows of the table of documents that are read at most; in a larger one nothing is looked up."""


class ShownExample(NamedTuple):
    """An example: what it is, and its pieces."""

    heading: str
    pieces: list[lookup.MarkedPiece]


@dataclass(frozen=True)
class Masks:
    """The first examples of a set."""

    set: str = ""
    examples: list[ShownExample] = field(default_factory=list)
    looked_at: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    """Pieces of segment A of the first examples by source; empty if there are too many documents."""


def read_masks(folder: Path, manifest: Manifest, vocabulary: Vocabulary) -> Masks:
    """Reads the first examples of the first set; none where a folder has no examples."""
    training = [figures for figures in manifest.figures if not figures.validation and figures.examples]
    if not training:
        return Masks()
    figures = min(training, key=lambda one: one.set)
    record = next(record for record in figures.shards if record.rows)
    batch = lookup.read_examples(record.find(folder), manifest, figures.length, record.rows)
    some = batch.slice(0, MOST_EXAMPLES)
    numbers, boundaries = (np.asarray(some[name]).tolist() for name in ("document", "boundary"))
    documents = lookup.read_document_rows(folder, numbers) if manifest.num_documents <= MOST_DOCUMENTS else {}
    shown = []
    for row in range(min(SHOWN, record.rows)):
        example = lookup.read_example(batch, row, figures.length, folder / record.path)
        if max([*example.pieces, *example.labels.values()], default=0) >= len(vocabulary):
            raise DamageError(f"{folder / record.path}: example {row} has a piece beyond its {vocabulary.file}")
        example = replace(example, source=lookup.name_document(documents.get(example.document, {})))
        heading, pieces = lookup.describe_example(row, example, vocabulary), lookup.mark_pieces(example, vocabulary)
        shown.append(ShownExample(heading, list(pieces)))
    by_source = Counter[str]()
    for number, boundary in zip(numbers, boundaries, strict=True):
        if number in documents:
            by_source[documents[number]["source"]] += boundary - 2  # without [CLS] and [SEP]
    return Masks(figures.set.folder, shown, some.num_rows, by_source)
