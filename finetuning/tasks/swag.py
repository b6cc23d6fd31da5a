"""SWAG: which of four endings continues a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.common.arrays import Array
from data_prep.readers.tables import TextTable, read_table
from finetuning.files.splits import find_swag, name_files
from finetuning.inputs import Encoded, Ragged
from finetuning.tasks.sentences import SentenceItems, SentenceTask, hold_out, join_items, read_classes
from finetuning.tasks.task import Setup
from pretraining.architectures.weights import TaskHead

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
FIELDS = ("sent1", "sent2", *ENDINGS)
"""The columns of an item: a sentence, the beginning of the next one, and its possible endings."""
LABELS = {str(number): number for number in range(len(ENDINGS))}
HELD_OUT = 0.2
"""The share of the items that is scored if there is only one file."""


class Endings(SentenceItems):
    """Items with the columns of `FIELDS`; each makes one sequence for every ending."""

    def encode(self, numbers: Array) -> Encoded:
        """Encodes the first sentence with each ending of the next one."""
        before, begun, *endings = ([column[number] for number in numbers.tolist()] for column in self.texts)
        first = self.cutter.cut_texts(before).take(np.repeat(np.arange(len(numbers)), len(endings)))
        whole = [f"{begin} {end}" for begin, *ends in zip(begun, *endings, strict=True) for end in ends]
        sequences = self.cutter.lay_out(first, self.cutter.cut_texts(whole), self.length)
        labels = None if self.labels is None else Ragged.from_table(self.labels[numbers])
        return Encoded(sequences, labels, choices=len(endings))


def open_swag(folder: Path, setup: Setup) -> SentenceTask:
    """Reads train.csv, val.csv and test.csv of a folder; or its only CSV, under another name, of which a share is
    scored."""
    files = find_swag(folder, setup.trained is not None)
    notes = [name_files(files)] if "dev" in files else []
    items = {
        split: join_items([_make_items(read_table(path), split != "test", setup) for path in paths])
        for split, paths in files.items()
    }
    if "dev" not in items:
        items, note = hold_out(files["train"][0], items, HELD_OUT)
        notes.append(note)
    return SentenceTask("swag", TaskHead("choice"), "accuracy", ("accuracy",), FIELDS, items, tuple(notes))


def _make_items(table: TextTable, labelled: bool, setup: Setup) -> Endings:
    labels = read_classes(table, "label", LABELS) if labelled else None
    return Endings(setup.cutter, setup.settings.length, tuple(table.column(name) for name in FIELDS), labels)
