"""The user's own tasks: a TOML file names the files and columns of texts and labels.

name = "reviews"
kind = "classes"        # or "labels", "score", "tags", "embeddings"
train = "train.csv"     # TSV, CSV, JSON lines or Parquet, seen from the folder of this file
dev = "dev.csv"
text = "review"
label = "stars"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from data_prep.common.arrays import Array
from data_prep.common.errors import Checks, UserError, check_all
from data_prep.common.files import absence
from data_prep.common.locks import LOCK
from data_prep.common.reading import Form, read_file, read_settings
from data_prep.common.sections import Section
from data_prep.readers.tables import TextTable, read_table
from finetuning.files.splits import name_files
from finetuning.files.tag_files import Fields
from finetuning.results import AVERAGES
from finetuning.tasks import scores
from finetuning.tasks.embeddings import RANKED, EmbeddingItems, EmbeddingTask, number_texts, read_full_column
from finetuning.tasks.ner import open_tags
from finetuning.tasks.sentences import (
    SentenceItems,
    SentenceTask,
    hold_out,
    read_classes,
    read_labels,
    read_scores,
    require_fp32_resolution,
)
from finetuning.tasks.task import Setup, Task
from pretraining.architectures.weights import TaskHead

Text = Annotated[str, Field(min_length=1)]
Tables = Mapping[str, TextTable]
Read = tuple[TaskHead, tuple[str, ...], Mapping[str, SentenceItems]]
"""A head, the figures, the default first, and the items of each split."""


class OwnTask(Section):
    """The keys of a task's file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Name of the task, in tables and as a folder."""
    kind: Literal["classes", "labels", "score", "tags", "embeddings"]
    """Kind of answer: one class of several, several labels at once, a number, a tag for each word, or a vector."""
    train: Text
    """The file to train on."""
    dev: str = ""
    """The file that is scored."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training items that is scored instead, where there is no `dev`; of tags whole documents, where their
    file parts any."""
    test: str = ""
    """A file that is predicted; scored too where it has labels."""
    text: Text = "text"
    """The column of the text; of its words, for tags in JSON lines or Parquet; for vectors `question` by default."""
    second: str | Annotated[tuple[Text, ...], Field(strict=False)] = ""
    """The column of the second text of pairs; for vectors `passage` by default, or the columns of the passage and of
    others that do not belong to the question of their row."""
    label: Text = "label"
    """The column of the class, the number or the tags; for vectors of the likeness of two texts, none by default."""
    labels: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """The classes in the order of the outputs (default: those of the training items, sorted); for several labels at
    once the columns that say with 0 or 1 whether each of them holds."""
    metric: str = ""
    """The figure by which runs are compared (default: accuracy; f1_micro for several labels; pearson for numbers;
    for vectors mrr@10, or spearman for scores)."""

    @property
    def has_label(self) -> bool:
        """Whether the file names a label."""
        return "label" in self.model_fields_set

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns of texts."""
        second = (self.second,) * bool(self.second) if isinstance(self.second, str) else self.second
        if self.kind != "embeddings":
            return (self.text, *second)
        return (self.text if "text" in self.model_fields_set else "question", *(second or ("passage",)))


def open_own(path: Path, setup: Setup) -> Task:
    """Reads the task that a TOML file describes."""
    own, trained = read_own(path), setup.trained
    files = {"train": own.train, "dev": own.dev, "test": own.test}
    places = {split: path.parent / file for split, file in files.items() if file}
    if trained and "dev" in places and not places["train"].exists():
        del places["train"]
    else:
        trained = None
    paths = {split: [place] for split, place in places.items()}
    if own.kind == "tags":
        named = Fields(own.text, (own.label,))
        return open_tags(own.name, paths, replace(setup, trained=trained), named, own.held_out)
    reads = (partial(_read_columns, own, split, place) for split, place in places.items())
    _, *found = check_all(partial(_check_metric, own, path, list_figures(own)), *reads)
    tables = dict(zip(places, found, strict=True))
    notes = [name_files(paths)]
    is_of_vectors = own.kind == "embeddings"
    head, metrics, items = _read_items(own, tables, setup, trained)
    _check_metric(own, path, metrics)
    if "dev" not in items:
        items, note = hold_out(places["train"], items, own.held_out, slice(1, 2) if is_of_vectors else slice(None))
        notes.append(note)
    known = own.name, head, own.metric or metrics[0], metrics, own.fields, items, tuple(notes)
    return EmbeddingTask(*known, setup.settings.embeddings.widths) if is_of_vectors else SentenceTask(*known)


def list_figures(own: OwnTask) -> tuple[str, ...]:
    """Lists the figures of a kind of task."""
    return RANKED if own.kind == "embeddings" and not own.has_label else tuple(scores.METRICS[own.kind])


def _check_metric(own: OwnTask, path: Path, metrics: Sequence[str]) -> None:
    """Raises UserError for a metric that is none of these."""
    if own.metric and own.metric not in metrics:
        raise UserError(f"{path}: metric = {own.metric!r}: here there is {', '.join(metrics)}")


def _read_columns(own: OwnTask, split: str, place: Path) -> TextTable:
    """Reads the file of a split; UserError for all columns that it lacks."""
    table, answers = read_table(place), own.labels if own.kind == "labels" else (own.label,)
    needs_answers = split != "test" and (own.kind != "embeddings" or own.has_label)
    check_all(*(partial(table.column, name) for name in (*own.fields, *(answers if needs_answers else ()))))
    return table


def _read_items(own: OwnTask, tables: Tables, setup: Setup, trained: TaskHead | None) -> Read:
    """Reads texts, pairs, or texts that belong together, with their classes, labels or scores."""
    is_of_vectors, has_label = own.kind == "embeddings", own.has_label
    read = read_full_column if is_of_vectors else TextTable.column
    texts = {split: tuple(read(table, field) for field in own.fields) for split, table in tables.items()}
    make = EmbeddingItems if is_of_vectors else SentenceItems
    if is_of_vectors:
        head = TaskHead(own.kind)
    else:
        classes = own.labels or trained.labels if trained else _list_classes(own, tables["train"])
        head = TaskHead(own.kind, classes)
    metrics = list_figures(own)
    if head.kind == "classes" and len(head.labels) != 2:
        metrics = tuple(name for name in metrics if name != "f1")
    items, first_label = dict[str, SentenceItems](), own.labels[0] if own.kind == "labels" else own.label
    for split, table in tables.items():
        labels = None
        if is_of_vectors and not has_label:
            labels = number_texts(texts[split])
        elif split != "test" or any(map(any, table.list_columns(first_label))):  # it may have none
            labels = _read_labels(own, head, table)
        if split == "train" and own.kind == "score":
            require_fp32_resolution(table, own.label)
        items[split] = make(setup.cutter, setup.settings.length, texts[split], labels)
    return head, metrics, items


def read_own(path: Path) -> OwnTask:
    """Reads the file of a task, and reports all its faults at once, with the files that are missing."""
    if not path.is_file():
        raise UserError(f"{path}: {absence(path)}; a task says its name, kind, train, text and label in a TOML file")
    form = Form(OwnTask, path.parent)
    try:
        return read_settings(form, path, find_faults=lambda own: [fault for ok, fault in _check_keys(own) if not ok])
    except UserError as error:
        named = map(read_file(form, path).get, ("train", "dev", "test"))
        missing = (at for file in named if isinstance(file, str) and not (at := path.parent / file).exists())
        raise UserError("\n".join([str(error), *(f"{at}: {absence(at)}" for at in missing)])) from error


def _check_keys(own: OwnTask) -> Checks:
    """Checks combinations of keys."""
    has_label = own.has_label
    yield own.kind != "tags" or not own.second, 'second: kind = "tags" takes one text'
    takes_more = own.kind == "embeddings" and not has_label
    yield takes_more or len(own.fields) < 3, 'second: only kind = "embeddings" without label takes several passages'
    yield len({*own.fields}) == len(own.fields), f"second: of {', '.join(own.fields)} each should be another column"
    is_free = own.name not in (LOCK, AVERAGES) and not own.name.endswith(".json")
    yield is_free, f"name: {own.name} has another meaning in the folder of results; take another"
    yield (
        not own.dev or "held_out" not in own.model_fields_set,
        "held_out: there is a dev file, which is scored instead",
    )
    yield own.kind != "tags" or not own.metric, 'metric: kind = "tags" is compared by F1 of its entities'
    yield own.kind != "labels" or own.labels, 'labels: is missing: the column of each label, ["…", "…"]'
    yield own.kind != "labels" or not has_label, 'label: the columns of kind = "labels" stand in labels'
    yield own.kind in ("classes", "labels") or not own.labels, f'labels: kind = "{own.kind}" has none'
    yield own.kind != "classes" or len(own.labels) != 1, "labels: one class leaves nothing to decide"
    yield len(set(own.labels)) == len(own.labels), "labels: a name stands there twice"


def _list_classes(own: OwnTask, train: TextTable) -> tuple[str, ...]:
    """Lists the names of the classes or labels."""
    if own.labels or own.kind != "classes":
        return own.labels
    values = train.column(own.label)
    for row, value in enumerate(values):
        if value.lower() in ("", "nan"):
            train.fail(row, f"the label is {value or 'empty'}; name it in labels if it is meant")
    if len(found := set(values)) == 1:
        fault = f"all labels are {values[0]!r}, so there is nothing to learn"
        raise UserError(f"{train.path}: {fault}; name more in labels")
    return tuple(sorted(found, key=lambda value: (int(value) if value.isdecimal() else float("inf"), value)))


def _read_labels(own: OwnTask, head: TaskHead, table: TextTable) -> Array:
    if own.kind in ("score", "embeddings"):
        return read_scores(table, own.label)
    if own.kind == "labels":
        return read_labels(table, own.labels)
    known = {name: number for number, name in enumerate(head.labels)}
    return read_classes(table, own.label, known, of_train=not own.labels)
