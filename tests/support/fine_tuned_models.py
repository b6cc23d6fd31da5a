"""Small models of every kind as transformers saves them, and items of every kind as a model takes them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.transformers_models import PIECES, SHAPE, their_model

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import predict
from finetuning.inputs import Encoded, Ragged, Sequences
from finetuning.model.heads import TaskBatch
from finetuning.running.batches import pack
from pretraining.architectures.weights import Kind, TaskHead

Ask = Callable[..., str]
"""Calls predict.py on a model, of a kind or in a folder, with these words; returns what it prints, or its refusal."""

LABELS: dict[int, str] = {0: "O", 1: "B-X", 2: "I-X"}
OF_TEXTS: Any = transformers.BertForSequenceClassification
MODELS: dict[Kind, tuple[Any, dict[str, Any]]] = {
    "classes": (OF_TEXTS, {"id2label": LABELS}),
    "labels": (OF_TEXTS, {"id2label": LABELS, "problem_type": "multi_label_classification"}),
    "score": (OF_TEXTS, {"num_labels": 1, "problem_type": "regression"}),
    "choice": (transformers.BertForMultipleChoice, {}),
    "spans": (transformers.BertForQuestionAnswering, {}),
    "tags": (transformers.BertForTokenClassification, {"id2label": LABELS}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """What transformers saves of a model of every kind, whose head speaks up; tests only read it."""
    found = {}
    for kind, (theirs, settings) in MODELS.items():
        found[kind] = folder = tmp_path_factory.mktemp(kind)
        model = their_model(theirs, **settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith(("classifier", "qa_outputs")):
                    parameter.mul_(10)
        model.save_pretrained(folder)
        WordPiece(PIECES, cased=False).write(folder)
    return found


@pytest.fixture
def ask(folders: Mapping[str, Path], capfd: pytest.CaptureFixture[str]) -> Ask:
    """Calls the command in this process; it says either answers or why there are none."""

    def call(model: str | Path, *words: object, code: int = 0) -> str:
        place = folders[model] if isinstance(model, str) else model
        assert predict.main([str(place), *map(str, words)]) == code
        answers, errors = capfd.readouterr()
        assert not (answers if code else errors)
        return errors if code else answers

    return call


# Items

LENGTHS = [6, 2, 9, 4]
"""Pieces of the items."""
CHOICES = 2


def head_of(kind: Kind) -> TaskHead:
    """A head of this kind."""
    return TaskHead(kind, ("a", "b", "c") if kind in ("classes", "labels", "tags") else ())


def items_of(kind: Kind, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> Encoded:
    """An item of every length, with a label."""
    choices, items = CHOICES if kind == "choice" else 1, len(lengths)
    random = np.random.default_rng(seed)
    pieces = draw_pieces(random, np.repeat(lengths, choices))
    words = Ragged.from_rows([np.arange(length - 1) for length in lengths])
    labels = {
        "score": Ragged.from_table(random.normal(size=(items, 1)).astype(np.float32)),
        "labels": Ragged.from_table(random.integers(0, 2, (items, 3))),
        "spans": Ragged.from_table(np.tile([0, 1], (items, 1))),
        "tags": Ragged(random.integers(0, 3, len(words.values)), words.ends),
    }.get(kind, Ragged.from_table(random.integers(0, 2, (items, 1))))
    return Encoded(Sequences(pieces, pieces.lengths), labels, words if kind == "tags" else None, choices)


def draw_pieces(random: np.random.Generator, lengths: Any) -> Ragged:
    """Sequences of these lengths."""
    return Ragged.from_rows([random.integers(1, SHAPE.vocabulary, length).astype(np.int32) for length in lengths])


def batch_of(kind: str, lengths: tuple[int, ...]) -> TaskBatch:
    """Sequences of these lengths without labels: of tags every second piece begins a word, a choice has three."""
    pieces = draw_pieces(np.random.default_rng(0), lengths)
    words = Ragged.from_rows([np.arange(0, length, 2) for length in lengths])
    sequences = Sequences(pieces, np.array(lengths) // 2 + 1)
    encoded = Encoded(sequences, None, words if kind == "tags" else None, 3 if kind == "choice" else 1)
    return pack(encoded, np.arange(len(encoded)))
