"""Heads learn as those of transformers do: the same weights, data and order give the same losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.pretraining_reference import their_config
from support.transformers_models import SHAPE

from data_prep.common.arrays import Array
from finetuning.inputs import Encoded, Sequences
from finetuning.model.heads import TaskModel
from finetuning.ragged import Ragged
from finetuning.running.batches import pack
from pretraining.huggingface.folders import read_fine_tuned
from pretraining.huggingface.weights import KINDS, Kind, TaskHead

STEPS, ITEMS, LENGTH, CHOICES = 3, 4, 12, 3
NAMES = ("a", "b", "c")
HEADS = {kind: TaskHead(kind, NAMES if kind in ("classes", "labels", "tags") else ()) for kind in KINDS}
PROBLEMS = {"classes": "single_label_classification", "labels": "multi_label_classification", "score": "regression"}


def made(kind: Kind, random: np.random.Generator) -> Encoded:
    """Items of one length, since transformers would let padding take part in the choice of a span."""
    choices = CHOICES if kind == "choice" else 1
    pieces = random.integers(1, SHAPE.vocabulary, (ITEMS * choices, LENGTH)).astype(
        np.int32
    )  # 0 is padding: not trained
    words = Ragged.from_rows([np.sort(random.choice(LENGTH, 5, replace=False)) for _ in range(ITEMS)])
    labels: Ragged = {
        "classes": Ragged.from_table(random.integers(0, 3, (ITEMS, 1))),
        "labels": Ragged.from_table(random.integers(0, 2, (ITEMS, 3))),
        "score": Ragged.from_table(random.normal(size=(ITEMS, 1)).astype(np.float32)),
        "choice": Ragged.from_table(random.integers(0, CHOICES, (ITEMS, 1))),
        "spans": Ragged.from_table(np.sort(random.integers(0, LENGTH, (ITEMS, 2)))),
        "tags": Ragged(random.integers(0, 3, len(words.values)), words.ends),
    }[kind]
    second = np.full(ITEMS * choices, 7)
    return Encoded(Sequences(Ragged.from_table(pieces), second), labels, words if kind == "tags" else None, choices)


def theirs(encoded: Encoded, kind: Kind) -> dict[str, Any]:
    """The same items as transformers takes them."""
    rows = (ITEMS, CHOICES, LENGTH) if kind == "choice" else (ITEMS, LENGTH)
    pieces = torch.from_numpy(encoded.sequences.pieces.values.astype(np.int64)).view(rows)
    segments = (torch.arange(LENGTH) >= 7).long().expand(rows)
    given: dict[str, Any] = {"input_ids": pieces, "token_type_ids": segments}
    assert encoded.labels is not None
    values: Array = encoded.labels.values
    if kind == "spans":
        first, last = torch.from_numpy(values.reshape(-1, 2)).T
        return {**given, "start_positions": first, "end_positions": last}
    if kind == "tags":
        assert encoded.words is not None
        table = torch.full((ITEMS, LENGTH), -100)
        for item in range(ITEMS):
            table[item, encoded.words.row(item)] = torch.from_numpy(encoded.labels.row(item))
        return {**given, "labels": table}
    labels = torch.from_numpy(values)
    return {**given, "labels": labels.view(ITEMS, 3).float() if kind == "labels" else labels}


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_give_the_losses_of_transformers(kind: Kind, tmp_path: Path) -> None:
    head, random = HEADS[kind], np.random.default_rng(0)
    settings: dict[str, Any] = {}
    if head.labels or kind == "score":
        settings |= {"num_labels": head.outputs, "id2label": dict(enumerate(head.labels or ["score"]))}
        settings |= {"problem_type": PROBLEMS[kind]} if kind in PROBLEMS else {}
    torch.manual_seed(0)
    their_model = getattr(transformers, head.architecture)(
        their_config(replace(SHAPE, dropout=0.0, attention_dropout=0.0), **settings)
    ).train()
    their_model.save_pretrained(tmp_path)
    shape, read_head, weights = read_fine_tuned(tmp_path)
    assert read_head == head
    our_model = TaskModel(shape, head)
    our_model.load_state_dict(weights)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (our_model, their_model)]
    for _ in range(STEPS):
        encoded = made(kind, random)
        batch = pack(encoded, np.arange(ITEMS))
        assert encoded.labels is not None
        ours = our_model.train()(batch).loss / len(encoded.labels.values)
        their_loss = their_model(**theirs(encoded, kind)).loss
        assert ours.item() == pytest.approx(their_loss.item(), abs=1e-5)
        for loss, optimizer in zip((ours, their_loss), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_sequence_gives_does_not_depend_on_its_batch(kind: Kind) -> None:
    """Logits of items together are those of every item alone, in the order of the batch."""
    encoded = made(kind, np.random.default_rng(1))
    model = TaskModel(SHAPE, HEADS[kind]).initialize(0).eval()
    with torch.inference_mode():
        together = model.logits(pack(encoded, np.array([2, 0, 3])))
        apart = torch.cat([model.logits(pack(encoded, np.array([item]))) for item in (2, 0, 3)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)


def test_nothing_is_learned_from_items_without_labels() -> None:
    encoded = made("classes", np.random.default_rng(2))
    model = TaskModel(SHAPE, HEADS["classes"]).initialize(0)
    model(pack(encoded, np.arange(2), labelled=False)).loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
