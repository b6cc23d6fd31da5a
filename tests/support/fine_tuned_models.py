"""Small models of every kind as transformers saves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.transformers_models import PIECES, their_model
from transformers import (
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from finetuning import predict
from pretraining.architectures.weights import Kind

Ask = Callable[..., str]
"""Calls predict.py on a model, of a kind or in a folder, with these words; returns what it prints, or its refusal."""

LABELS: dict[int, str] = {0: "O", 1: "B-X", 2: "I-X"}
MODELS: dict[Kind, tuple[Any, dict[str, Any]]] = {
    "classes": (BertForSequenceClassification, {"id2label": LABELS}),
    "labels": (BertForSequenceClassification, {"id2label": LABELS, "problem_type": "multi_label_classification"}),
    "score": (BertForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
    "choice": (BertForMultipleChoice, {}),
    "spans": (BertForQuestionAnswering, {}),
    "tags": (BertForTokenClassification, {"id2label": LABELS}),
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
