"""A sentence of the data as the rows of a table mask it, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.reproduction.declaration import Declared, Row
from benchmarks.reproduction.origins import is_made
from benchmarks.reproduction.steps import Planner, merged
from data_prep.inspection.lookup import Example, Wanted, find_example
from data_prep.inspection.marking import marked
from data_prep.vocabulary.vocabulary import MASK, Vocabulary
from pretraining.config.overrides import load_recipe
from pretraining.model.rows import Draw, Rows
from pretraining.objectives.declaration import Objective, configured

EXAMPLE, LENGTH = 7, 40
"""Which example of the data is shown, and so many pieces of it."""
DRAWS = 3
"""Epochs whose masks are shown."""


def masked_sentences(declared: Declared, root: Path) -> dict[str, list[str]]:
    """The same example by the rows that mask it: once where masks are those of the data, otherwise in several epochs.
    Nothing where the data is not here."""
    rows = [row for row in declared.rows if not row.model]
    shards = Planner(declared).shards(rows[0])
    if not declared.table.masks or not is_made(shards, root):
        return {}
    example, vocabulary = find_example(Wanted(root / shards.name, index=EXAMPLE))
    return {row.name: texts_of(row, declared, example, vocabulary) for row in rows}


def texts_of(row: Row, declared: Declared, example: Example, vocabulary: Vocabulary) -> list[str]:
    """An example as a row masks it in some epochs, each text once."""
    words = merged(*declared.scale.train, *row.train)
    objective = configured(load_recipe(Path(declared.scale.recipe), words).objective)
    shown = (masked_by(objective, example, vocabulary, epoch) for epoch in range(DRAWS))
    return list(dict.fromkeys(" ".join(line.plain for line in marked(each, vocabulary)[:-1]) for each in shown))


def masked_by(objective: Objective, example: Example, vocabulary: Vocabulary, epoch: int) -> Example:
    """An example with what a model sees of it in an epoch, and what it is to predict."""
    rows = rows_of(example).cut(LENGTH)
    keys = np.array([epoch + 1], np.uint64)
    batch = objective.batch(rows, Draw(keys, 0.0, len(vocabulary), vocabulary.pieces.index(MASK)))
    labels = dict(zip(batch.chosen.tolist(), batch.labels.tolist(), strict=True))
    return replace(example, pieces=batch.pieces.tolist(), labels=labels, boundary=int(rows.boundaries[0]))


def rows_of(example: Example) -> Rows:
    """An example as the shards have it."""
    return Rows(
        where=np.zeros((1, 2), np.int64),
        lengths=np.array([len(example.pieces)]),
        pieces=np.array(example.pieces),
        boundaries=np.array([example.boundary]),
        random_next=np.array([example.random_next]),
        predictions=np.array([len(example.labels)]),
        positions=np.array([*example.labels]),
        labels=np.array([*example.labels.values()]),
    )
