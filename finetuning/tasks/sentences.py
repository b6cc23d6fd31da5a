"""Texts or pairs of texts about which one thing is to be said: a class, several labels at once, or a number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.errors import UserError
from data_prep.common.files import replacing
from data_prep.readers.tables import TextTable
from finetuning.files.splits import choose_held_out
from finetuning.inputs import Cutter, Encoded, Ragged
from finetuning.results import Figures, name_predictions_file
from finetuning.scale import ScoreScale
from finetuning.tasks import baselines, scores
from finetuning.tasks.scores import Certainty, bootstrap_spreads, describe_classes, estimate_share_spread
from finetuning.tasks.task import Column, PieceLengths, Seen, Task
from pretraining.architectures.weights import TaskHead

Held = TypeVar("Held", bound="SentenceItems")
UNCUT = 2**31 - 1
"""A length beyond that of any text."""
FEWEST_STEPS = 100
"""The least standard deviation of scores, in steps between neighbouring fp32 numbers of their size."""
LARGEST = float(np.finfo(np.float32).max)
SHOWN = 20
"""Maximum labels in a message."""


@dataclass(frozen=True)
class SentenceItems:
    """Texts or pairs of texts with their labels."""

    cutter: Cutter
    length: int
    """The longest sequence, in pieces."""
    texts: tuple[Sequence[str], ...]
    """One column of texts, or two of pairs."""
    labels: Array | None
    """(n, 1): classes or scores; (n, labels): 0 or 1; None where unknown."""

    def __len__(self) -> int:
        return len(self.texts[0])

    def take(self: Held, numbers: Array) -> Held:
        """Returns these items alone."""
        texts = tuple([column[number] for number in numbers.tolist()] for column in self.texts)
        return replace(self, texts=texts, labels=None if self.labels is None else self.labels[numbers])

    def measure_whole(self, numbers: Array) -> Array:
        """Returns the pieces of these items' sequences before they are cut."""
        sequences: Ragged = replace(self, length=UNCUT).encode(numbers).sequences.pieces
        return sequences.lengths

    def encode(self, numbers: Array) -> Encoded:
        """Cuts the texts of these items into pieces."""
        columns = ([column[number] for number in numbers.tolist()] for column in self.texts)
        first, *second = map(self.cutter.cut_texts, columns)
        sequences = self.cutter.lay_out(first, second[0] if second else None, self.length)
        return Encoded(sequences, None if self.labels is None else Ragged.from_table(self.labels[numbers]))


@dataclass
class SentenceTask(Task):
    """A task about texts or pairs of texts."""

    name: str
    head: TaskHead
    metric: str
    metrics: tuple[str, ...]
    """The figures of a split."""
    fields: tuple[str, ...]
    """The names of a text or of the two of a pair."""
    items: Mapping[str, SentenceItems]
    """The items of `train` and of the scored or predicted splits."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        asked = {name: each for name, each in self.items.items() if name != "train"}
        self.dev: Mapping[str, SentenceItems] = {name: each for name, each in asked.items() if each.labels is not None}
        self.test = {name: each for name, each in asked.items() if each.labels is None}
        self.train: SentenceItems = self.items["train"] if "train" in self.items else next(iter(self.dev.values()))

    @property
    def scale(self) -> ScoreScale:
        """The scale of the training scores."""
        if self.head.kind != "score":
            return ScoreScale()
        assert self.train.labels is not None
        return ScoreScale.from_numbers(self.train.labels)

    def list_columns(self, split: str) -> list[Column]:
        """Lists the texts of a split, and their labels."""
        items = self.items.get(split, self.train)
        return [*items.texts] if items.labels is None else [*items.texts, items.labels]

    def describe_split(self, split: str) -> Seen:
        """Describes the items of a split, with their classes, labels or scores."""
        items = self.items.get(split, self.train)
        labels, names = items.labels, self.head.labels
        assert labels is not None
        lengths = PieceLengths("texts", "length", items.length, items.measure_whole)
        seen = Seen(items.texts, [row.tobytes() for row in labels], (lengths,))
        if not names:
            return seen
        many = labels.sum(0) if self.head.kind == "labels" else np.bincount(labels[:, 0], minlength=len(names))
        return replace(seen, counts=dict(zip(names, many.tolist(), strict=False)))  # choices have no names

    def answer_by_baseline(self) -> tuple[str, dict[str, Ragged]] | None:
        """Fits a linear model to words, and to the overlap of pairs; None for choices, and for vectors without
        scores."""
        train, kind = self.train, self.head.kind
        assert train.labels is not None
        if kind == "choice" or (kind == "embeddings" and train.labels.shape[1] > 1):
            return None
        asked = {split: items.texts for split, items in self.dev.items()}
        return baselines.answer_texts(self.head, train.texts, train.labels, asked)

    def score(self, split: str, outputs: Ragged) -> Figures:
        """Computes the figures of a split of `dev`."""
        return scores.compute_figures(self.head.kind, self.metrics, *self._compare_answers(split, outputs))

    def estimate_certainty(self, split: str, outputs: Ragged) -> Certainty:
        """Bootstraps items; accuracy and the figures of classes are shares, which need no bootstrap."""
        labels, said = self._compare_answers(split, outputs)
        items, names = len(labels), self.head.labels
        compute = partial(scores.compute_figures, self.head.kind, self.metrics)
        found = bootstrap_spreads(items, lambda chosen: compute(labels[chosen], said[chosen]))
        if "accuracy" in found:
            found["accuracy"] = estimate_share_spread(items * scores.accuracy(labels, said), items)
        return Certainty(
            items, found, describe_classes(names, scores.count_answers(labels, said, len(names))) if names else {}
        )

    def _compare_answers(self, split: str, outputs: Ragged) -> tuple[Array, Array]:
        """Returns the right and the predicted answers to a split of `dev`."""
        labels, kind = self.dev[split].labels, self.head.kind
        assert labels is not None
        return labels if kind == "labels" else labels[:, 0], scores.compute_answers(kind, outputs.values)

    def is_degenerate(self, split: str, outputs: Ragged) -> bool:
        """Tells whether a model gives every item the same answer, or nearly the same score."""
        return scores.is_degenerate(self.head, outputs, self.dev[split].labels)

    def write_predictions(self, split: str, outputs: Ragged, folder: Path) -> None:
        """Writes a line for every item: its number, its answer, and the probability of each class."""
        with replacing(name_predictions_file(folder, split, ".tsv")) as file:
            file.write(format_predictions(self.head, outputs.values))

    def describe_use(self, outputs: Ragged) -> dict[str, Any]:  # noqa: ARG002
        """Describes the layout of text."""
        return {"length": self.train.length, "fields": list(self.fields)}


def join_items(parts: Sequence[Held]) -> Held:
    """Joins the items of the files of a split."""
    texts = tuple(list(itertools.chain(*columns)) for columns in zip(*(part.texts for part in parts), strict=True))
    labels = [part.labels for part in parts if part.labels is not None]
    return replace(parts[0], texts=texts, labels=np.concatenate(labels) if labels else None)


def hold_out(
    place: Path, items: Mapping[str, Held], share: float, columns: slice = slice(None)
) -> tuple[dict[str, Held], str]:
    """Divides the items of a training file into training and dev items; returns them with a note for the user. Items
    with equal texts in these columns stay together."""
    whole = items["train"]
    chosen, note = choose_held_out(place, map("\t".join, zip(*whole.texts[columns], strict=True)), share, "rows")
    parts = {"train": whole.take(np.flatnonzero(np.invert(chosen))), "dev": whole.take(np.flatnonzero(chosen))}
    return parts | {split: each for split, each in items.items() if split != "train"}, note


def format_predictions(head: TaskHead, logits: Array) -> bytes:
    """Formats the file of predictions, an item a line with the probability of each class."""
    numbers = map(str, range(len(logits)))
    if head.kind == "score":
        spelled = (f"{score:.9g}" for score in logits[:, 0].tolist())
        return format_tsv(("index", "prediction"), zip(numbers, spelled, strict=True))
    names = [" ".join(name.split()) for name in head.labels] or [str(choice) for choice in range(logits.shape[1])]
    shares = ([f"{share:.6f}" for share in row] for row in scores.compute_probabilities(head.kind, logits).tolist())
    rows = zip(numbers, _spell_answers(head, names, logits), shares, strict=True)
    return format_tsv(("index", "prediction", *names), ((number, said, *row) for number, said, row in rows))


def _spell_answers(head: TaskHead, names: Sequence[str], logits: Array) -> list[str]:
    """Spells predicted classes by name; several labels of an item are separated by blanks."""
    answers = scores.compute_answers(head.kind, logits).tolist()
    if head.kind == "labels":
        return [" ".join(itertools.compress(names, row)) for row in answers]
    return [names[answer] for answer in answers]


def format_tsv(names: Sequence[str], rows: Iterable[Sequence[str]]) -> bytes:
    """Spells a table as TSV."""
    return "".join("\t".join(row) + "\n" for row in (names, *rows)).encode(errors="replace")


def read_classes(table: TextTable, column: str | int, known: Mapping[str, int], *, of_train: bool = False) -> Array:
    """Reads a column of classes; `known` maps all spellings to numbers, or those `of_train`."""
    values = table.column(column)
    numbers = [known.get(value, -1) for value in values]
    if -1 in numbers:
        row = numbers.index(-1)
        shown = ", ".join(itertools.islice(known, SHOWN)) + ", …" * (len(known) > SHOWN)
        cure = ", as in train: leave other rows out, or name all classes in labels" * of_train
        table.fail(row, f"unknown label {values[row]!r}; the labels are {shown}{cure}")
    return np.array(numbers, np.int64)[:, None]


def read_scores(table: TextTable, column: str | int, limits: tuple[float, float] = (-LARGEST, LARGEST)) -> Array:
    """Reads a column of numbers within these limits."""
    values = table.column(column)
    numbers = np.array([_parse_number(value) for value in values])
    wrong = ~((numbers >= limits[0]) & (numbers <= limits[1]))
    if wrong.any():
        row = int(wrong.argmax())
        table.fail(row, f"the score {values[row]!r} is not a number from {limits[0]:.2g} to {limits[1]:.2g}")
    return numbers.astype(np.float32)[:, None]


def require_fp32_resolution(table: TextTable, column: str) -> None:
    """Raises UserError for training scores whose differences are lost in fp32. All values must be numbers."""
    exact = np.array([float(value) for value in table.column(column)])
    if exact.max() > exact.min() and exact.std() < FEWEST_STEPS * np.spacing(np.float32(np.abs(exact).max())):
        there = f"scores from {exact.min():.12g} to {exact.max():.12g}"
        raise UserError(f"{table.path}: {there} are too near to each other for fp32: subtract what they have in common")


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def read_labels(table: TextTable, columns: Sequence[str]) -> Array:
    """Reads a column of 0 and 1 for each of several labels."""
    known = {"0": 0, "1": 1, "false": 0, "true": 1, "False": 0, "True": 1}
    return np.concatenate([read_classes(table, column, known) for column in columns], axis=1)
