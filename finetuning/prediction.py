"""Predictions of a fine-tuned model, from Python and for predict.py.

    from finetuning.prediction import load
    model = load("runs/mini/glue/sst2/model")
    model(["a fine film"])  # [{"label": "1", "probability": 0.93, "probabilities": {"0": 0.07, "1": 0.93}}]

A row is a text, several texts (a pair, a question with its paragraph, a text with its choices), or a dictionary of them
by field. In a folder that was fine-tuned here, task.json has the names of the fields and the length of sequences; a
folder of transformers gets the usual defaults.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import ValidationError

from data_prep.common.errors import UserError, quote
from data_prep.common.launchers import World
from data_prep.readers.tables import told_at
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.flags import Numbers
from finetuning.inputs import Cutter, Items, Ragged
from finetuning.model.features import FeatureModel
from finetuning.model.heads import TaskModel
from finetuning.model.serving import ServedModel, check_int8
from finetuning.results import MODEL
from finetuning.running.base import compute_checksum
from finetuning.running.folders import has_no_class, read_without_class
from finetuning.running.outputs import iterate_logits, sort_outputs
from finetuning.settings import FineTuning, Spans
from finetuning.tasks.ner import SplitWords, TaggedWords
from finetuning.tasks.scores import compute_answers, compute_probabilities
from finetuning.tasks.sentences import SentenceItems
from finetuning.tasks.spans import TextWindows, find_answers
from finetuning.tasks.swag import Endings
from pretraining.answering.one_call import BYTES, can_multiply
from pretraining.architectures.weights import Kind, TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.engine.precision import choose_dtype, explain_slowness
from pretraining.huggingface.folders import (
    CONFIG,
    TASK,
    read_fine_tuned,
    read_head,
    read_length,
    read_pieces,
    read_shape,
    read_task,
)
from pretraining.model.batch import CPU
from pretraining.model.shape import Shape
from pretraining.processes.group import choose_device
from pretraining.scoring.embedding import Embedder

Row = str | Sequence[str] | Mapping[str, Any]
Texts = list[str]
"""The texts of a row, in the order of the fields; the words of a sentence to tag."""
Device = Literal["auto", "cpu", "cuda"]
Answer = dict[str, Any]
FIGURES = 9
"""Significant digits of a number: enough to distinguish neighbouring fp32 values."""
DIGITS = 6
"""Decimals of a probability."""
NAMES: dict[type, str] = {int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
"""What JSON calls values that are no row."""
ANSWER_LENGTH = 384
"""Default pieces of a question with a window of its text."""


def load(folder: str | Path, dtype: Numbers = "auto", device: Device = "auto", graphs: bool = True) -> Predictor:
    """Loads a model that was fine-tuned here or by transformers, for predictions.

    The default `dtype` suits the device, and is fp32 for vectors; the default device is a GPU if there is one, where
    `graphs` answer short texts at once.
    """
    folder = find_fine_tuned(Path(folder))
    if (folder / CONFIG).exists() and read_head(folder) == TaskHead("embeddings"):
        return TextEmbedder(folder, dtype, device)
    where = choose_device(device, World())
    model, head, vocabulary = read_without_class(folder) if has_no_class(folder) else _read(folder)
    task, length = read_task(folder), read_length(folder, model.shape)
    computes = choose_numbers(dtype, where, model.shape)
    served: ServedModel | FeatureModel
    if isinstance(model, TaskModel):
        served = ServedModel(model.convert_for_answers(computes, where), int8=dtype == "int8", graphs=graphs)
    elif dtype == "int8":
        raise UserError(f'{folder}: a BiLSTM on features does not compute in "int8"; take "auto"')
    else:
        served = model.to(where, computes).eval()
    kinds: dict[Kind, type[FineTuned]] = {"spans": _Spans, "tags": _Tags, "choice": _Choice}
    kind = kinds.get(head.kind, _Sentences)
    return kind(served, head, Cutter(vocabulary), _build_settings(folder, task, head, length), task, where)


def choose_numbers(dtype: Numbers, where: torch.device, shape: Shape) -> torch.dtype:
    """Chooses the numbers in which a model computes, but for those of layers in 8 bits."""
    if dtype != "int8":
        if dtype == "bf16" and explain_slowness(dtype, where):
            slow = "this processor emulates it, and answers take longer than in fp32, 5 to 9 times with AVX2"
            warnings.warn(f'dtype "bf16": {slow}; take "fp32" or "auto"', stacklevel=3)
        return choose_dtype(dtype, where)
    check_int8(where, shape)
    return choose_dtype("fp32" if can_multiply(BYTES) else "auto", where)


def find_fine_tuned(folder: Path) -> Path:
    """Finds the folder of the model, which may lie in the results of its task."""
    if not (folder / CONFIG).exists() and any((folder / MODEL / name).exists() for name in (CONFIG, TASK)):
        return folder / MODEL
    if tasks := sorted(path.parents[1] for path in folder.glob(f"*/{MODEL}/{TASK}")):
        if len(tasks) > 1:
            raise UserError(f"{folder}: the results of several tasks; name one of them: {', '.join(map(str, tasks))}")
        return tasks[0] / MODEL
    return folder


def _read(folder: Path) -> tuple[TaskModel, TaskHead, Vocabulary]:
    """Reads a folder of transformers."""
    read_shape(folder)
    if read_head(folder) is None:
        raise UserError(
            f"{folder}: not fine-tuned, so it has no answers; fine-tune it first, for example with\n"
            f"python finetuning/run_glue.py --model {quote(folder)}"
        )
    shape, head, weights = read_fine_tuned(folder)
    vocabulary = read_pieces(folder, shape, str(folder))
    model = TaskModel(shape, head)
    model.load_state_dict(weights)
    return model, head, vocabulary


def _build_settings(folder: Path, task: Mapping[str, Any], head: TaskHead, longest: int) -> FineTuning:
    """Builds the settings of the layout of text from task.json, otherwise from the usual defaults."""
    usual = min(ANSWER_LENGTH, longest) if head.kind == "spans" else longest
    question = min(Spans().question, usual // 2 - 1)
    spans = {name: task[name] for name in ("stride", "question", "answer") if name in task}
    try:
        layout = {"length": task.get("length", usual), "spans": {"question": question, **spans}}
        return FineTuning.model_validate(layout)
    except ValidationError as error:
        raise UserError(f"{folder / TASK}: {error}; fine-tune it anew") from error


class Predictor(ABC):
    """A model that answers rows of texts, which it finds by their fields."""

    usual: ClassVar[tuple[str, ...]] = ()
    """Default names of fields without task.json."""
    task: Mapping[str, Any]
    """The content of task.json, empty where there is none."""

    def name_fields(self, first: Row | None = None) -> tuple[str, ...]:
        """Returns the names of the texts of a row. Without task.json, the first row determines their number."""
        return tuple(self.task.get("fields", ())) or self.name_usual_fields(first)

    def name_usual_fields(self, first: Row | None) -> tuple[str, ...]:  # noqa: ARG002
        """Returns the names of fields without task.json, perhaps from a first row."""
        return self.usual

    def find_texts(self, row: Row, fields: Sequence[str]) -> Texts:
        """Finds the texts of these fields in a row; UserError where they are not there."""
        if isinstance(row, Mapping):
            row = list_field_values(row, fields)
        texts = [row] if isinstance(row, str) else list(row)
        if len(texts) != len(fields):
            found = f"{len(texts)} text{'s' * (len(texts) != 1)}"
            raise UserError(f"{found}; there should be {len(fields)} ({', '.join(fields)})")
        if wrong := [name for name, text in zip(fields, texts, strict=True) if not isinstance(text, str)]:
            raise UserError(f"{wrong[0]!r} should be a text")
        return [replace_surrogates(text) for text in texts]

    def __call__(self, rows: Sequence[Row]) -> list[Answer]:
        """Answers every row, in order: names and probabilities, as predict.py writes them."""
        if isinstance(rows, str | Mapping):
            raise UserError("one row alone; give a list of rows: model([row])")
        fields, found = tuple[str, ...](), list[Texts]()
        for number, row in enumerate(rows):
            if not isinstance(row, Iterable):
                raise UserError(f"texts[{number}] is {NAMES.get(type(row), type(row).__name__)}, not text")
            with told_at(f"texts[{number}]"):
                fields = fields or self.name_fields(row)
                found.append(self.find_texts(row, fields))
        return self.answer(found) if found else []

    @abstractmethod
    def answer(self, rows: Sequence[Texts]) -> list[Answer]:
        """Answers rows whose texts were found."""


class TextEmbedder(Predictor):
    """Answers a text by its vector, computed in fp32 unless other numbers are asked for."""

    def __init__(self, folder: Path, dtype: Numbers, device: Device = "auto") -> None:
        self.task, where = {"fields": ("text",)}, choose_device(device, World())
        self._model, self._dtype = StoredModel.open(str(folder)), "fp32" if dtype == "auto" else dtype
        computes = choose_numbers(self._dtype, where, self._model.shape)
        self.embedder = Embedder.open(self._model, where, computes, dtype == "int8")

    def describe(self) -> str:
        """Describes all that its vectors depend on, beside the texts."""
        model, way = self._model, self.embedder.pooling
        checksum = compute_checksum(model.vocabulary, model.shape, model.encoder)
        return f"{checksum} {way.how} {way.normalizes} {way.length} {self._dtype}"

    def answer(self, rows: Sequence[Texts]) -> list[Answer]:
        vectors = self.embedder.compute([text for (text,) in rows]).tolist()
        return [{"vector": [float(f"{value:.{FIGURES}g}") for value in vector]} for vector in vectors]


@dataclass(eq=False)
class FineTuned(Predictor):
    """A fine-tuned model that answers about text. A subclass for each kind of task makes items of rows, and answers of
    logits."""

    model: ServedModel | FeatureModel
    head: TaskHead
    cutter: Cutter
    settings: FineTuning
    task: Mapping[str, Any]
    device: torch.device

    def answer(self, rows: Sequence[Texts]) -> list[Answer]:
        items = self.make_items(rows)
        return self.make_answers(rows, items, self.logits(items))

    @torch.inference_mode()
    def logits(self, items: Items) -> Ragged:
        """Computes the logits of items, in batches of sequences of like lengths."""
        device = CPU if isinstance(self.model, ServedModel) else self.device  # it copies batches itself
        parts = list(iterate_logits(self.model.logits, self.head.kind, items, device))
        if not parts:
            return Ragged(np.empty((0, self.head.outputs), np.float32), np.empty(0, np.int64))
        return sort_outputs(parts)

    @abstractmethod
    def make_items(self, rows: Sequence[Texts]) -> Items:
        """Makes the items of rows."""

    @abstractmethod
    def make_answers(self, rows: Sequence[Texts], items: Items, outputs: Ragged) -> list[Answer]:
        """Makes answers of the logits of items."""


def list_field_values(row: Mapping[str, Any], fields: Sequence[str]) -> list[Any]:
    """Returns the values of these fields in a row; UserError if one is missing."""
    if missing := [name for name in fields if name not in row]:
        raise UserError(f"no field {missing[0]!r}; there is: {', '.join(map(str, row)) or 'none'}")
    return [row[name] for name in fields]


def replace_surrogates(text: str) -> str:
    """Replaces surrogates, which JSON can hold and UTF-8 cannot, by question marks."""
    return text.encode(errors="replace").decode()


class _Sentences(FineTuned):
    """A class, several labels or a number for a text or a pair."""

    usual = ("text", "text_pair")

    def name_usual_fields(self, first: Row | None) -> tuple[str, ...]:
        if isinstance(first, Mapping):
            is_pair = self.usual[1] in first
        else:
            is_pair = not isinstance(first, str | None) and len(first) > 1
        return self.usual[: 1 + is_pair]

    def make_items(self, rows: Sequence[Texts]) -> Items:
        return SentenceItems(self.cutter, self.settings.length, tuple(zip(*rows, strict=True)), None)

    def make_answers(self, rows: Sequence[Texts], items: Items, outputs: Ragged) -> list[Answer]:  # noqa: ARG002
        said = compute_answers(self.head.kind, outputs.values).tolist()
        if self.head.kind == "score":
            return [{"score": float(f"{value:.{FIGURES}g}")} for value in said]
        names = self.head.labels
        shares = compute_probabilities(self.head.kind, outputs.values).round(DIGITS).tolist()
        named = [dict(zip(names, row, strict=True)) for row in shares]
        if self.head.kind == "labels":
            held = [list(itertools.compress(names, row)) for row in said]
            return [{"labels": labels, "probabilities": row} for labels, row in zip(held, named, strict=True)]
        best = zip((names[number] for number in said), named, strict=True)
        return [{"label": name, "probability": row[name], "probabilities": row} for name, row in best]


class _Choice(FineTuned):
    """Which of several texts follows. The fields of task.json are SWAG's: the sentence before, the beginning of the
    next one, and its endings; without task.json, a text and its choices."""

    def name_usual_fields(self, first: Row | None) -> tuple[str, ...]:
        if isinstance(first, Mapping):
            return tuple(first)
        choices = 1 if isinstance(first, str | None) else len(first) - 1
        return ("text", *(f"choice{number}" for number in range(choices)))

    def find_texts(self, row: Row, fields: Sequence[str]) -> Texts:
        if len(fields) < 2:
            raise UserError("no choices; give a text and its choices")
        return super().find_texts(row, fields)

    def make_items(self, rows: Sequence[Texts]) -> Items:
        before, *others = zip(*rows, strict=True)
        begun = [] if "fields" in self.task else [("",) * len(rows)]
        return Endings(self.cutter, self.settings.length, (before, *begun, *others), None)

    def make_answers(self, rows: Sequence[Texts], items: Items, outputs: Ragged) -> list[Answer]:  # noqa: ARG002
        count = outputs.values.shape[1]
        shares = compute_probabilities("choice", outputs.values).round(DIGITS).tolist()
        best = compute_answers("choice", outputs.values).tolist()
        return [
            {"choice": choice, "text": row[choice - count], "probability": share[choice], "probabilities": share}
            for row, choice, share in zip(rows, best, shares, strict=True)
        ]


class _Spans(FineTuned):
    """The span of a text that answers a question, or an empty answer, with its probability."""

    usual = ("question", "context")

    def make_items(self, rows: Sequence[Texts]) -> TextWindows:
        return TextWindows([(question, context) for question, context in rows], self.cutter, self.settings)

    def make_answers(self, rows: Sequence[Texts], items: Items, outputs: Ragged) -> list[Answer]:  # noqa: ARG002
        assert isinstance(items, TextWindows)
        threshold = self.task.get("threshold")
        found = []
        for each in find_answers(items, outputs, optional=threshold is not None):
            text = each.text(threshold)
            chosen = next((one for one in each.candidates if one.text == text), None)
            start, end = (chosen.start, chosen.start + len(text)) if chosen and text else (None, None)
            share = round(chosen.probability, DIGITS) if chosen else 0.0
            found.append({"answer": text, "start": start, "end": end, "probability": share})
        return found


class _Tags(FineTuned):
    """A tag for each word; a text is split into words at blanks."""

    usual = ("tokens",)

    def find_texts(self, row: Row, fields: Sequence[str]) -> Texts:
        if isinstance(row, Mapping):
            (row,) = list_field_values(row, fields[:1])
        words = row.split() if isinstance(row, str) else row
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{fields[0]!r} should be a text or a list of words")
        return [replace_surrogates(word) for word in words]

    def make_items(self, rows: Sequence[Texts]) -> Items:
        ends = np.cumsum([len(row) for row in rows])
        words = SplitWords([word for row in rows for word in row], ends, ends[-1:])
        return TaggedWords(words, self.cutter, self.settings.length, False)

    def make_answers(self, rows: Sequence[Texts], items: Items, outputs: Ragged) -> list[Answer]:  # noqa: ARG002
        from seqeval.metrics.sequence_labeling import get_entities  # which machines for measurements lack

        labels = self.head.labels
        tags = iter([labels[best] for best in outputs.values.argmax(1).tolist()])
        shares = iter(compute_probabilities("tags", outputs.values).max(1, initial=0.0).round(DIGITS).tolist())
        found = []
        for words in rows:
            said = list(itertools.islice(tags, len(words)))
            answer = {"words": words, "tags": said, "probabilities": list(itertools.islice(shares, len(words)))}
            if any(label.startswith("B-") for label in labels):
                answer["entities"] = [
                    {"type": kind, "text": " ".join(words[first : last + 1]), "first": first, "last": last}
                    for kind, first, last in get_entities(said)
                ]
            found.append(answer)
        return found
