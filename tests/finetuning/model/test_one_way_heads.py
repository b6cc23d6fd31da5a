"""Heads on encoders that look one way: which piece stands for a text, and that a served model reads the same one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.one_way_reference import reference_states
from support.task_models import HEADS, task_weights
from support.transformers_models import PIECES, SHAPE, same
from torch import Tensor
from transformers import AutoModel

from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.inputs import Encoded, Sequences
from finetuning.model.heads import TaskBatch, TaskModel, compute_logits
from finetuning.model.serving import ServedModel
from finetuning.ragged import Ragged
from finetuning.running.batches import pack
from pretraining.huggingface.folders import read_fine_tuned, write_fine_tuned
from pretraining.huggingface.model_card import BaseSummary, TaskProvenance, make_task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.model.shape import Sees, Shape

LENGTHS = (7, 3, 31, 2, 7, 40)
SEES: tuple[Sees, ...] = ("before", "after")


def shape_of(sees: Sees) -> Shape:
    return replace(SHAPE, sees=sees, pairs=False)


def batch_of(kind: str) -> TaskBatch:
    """Sequences of these lengths; of tags every second piece begins a word, a choice has three."""
    random = np.random.default_rng(0)
    pieces = Ragged.from_rows([random.integers(1, SHAPE.vocabulary, length).astype(np.int32) for length in LENGTHS])
    words = Ragged.from_rows([np.arange(0, length, 2) for length in LENGTHS])
    sequences = Sequences(pieces, np.array(LENGTHS) // 2 + 1)
    encoded = Encoded(sequences, None, words if kind == "tags" else None, 3 if kind == "choice" else 1)
    return pack(encoded, np.arange(len(encoded)))


def reference(weights: dict[str, Tensor], shape: Shape, batch: TaskBatch, kind: str) -> Tensor:
    """The logits of a head in plain PyTorch, sequence by sequence."""
    rows = []
    for number, (begin, length) in enumerate(zip(batch.starts.tolist(), batch.lengths, strict=False)):
        pieces = batch.pieces[begin : begin + length].tolist()
        states = reference_states(weights, shape, pieces, LENGTHS[number] // 2 + 1)
        if kind == "tags":
            states = states[::2]
        elif kind != "spans":
            one = states[-1:] if shape.sees == "before" else states[:1]
            states = torch.tanh(one @ weights["pooler.weight"].T + weights["pooler.bias"])
        rows.append(states @ weights["head.weight"].T + weights["head.bias"])
    return torch.cat(rows).view(-1, 3) if kind == "choice" else torch.cat(rows)


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", HEADS)
@torch.inference_mode()
def test_a_text_is_read_from_the_piece_that_sees_all_of_it(kind: str, sees: Sees) -> None:
    shape, batch = shape_of(sees), batch_of(kind)
    weights = task_weights(HEADS[kind], shape=shape)
    models = [TaskModel(shape, HEADS[kind]) for _ in range(2)]
    for model in models:
        model.load_state_dict(weights)
    wanted = reference(weights, shape, batch, kind)
    torch.testing.assert_close(models[0].eval().logits(batch), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(ServedModel(models[1]).logits(batch), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("kind", HEADS)
def test_a_folder_says_it_and_is_refused_where_nobody_else_computes_it(kind: str, sees: Sees, tmp_path: Path) -> None:
    shape, head = shape_of(sees), HEADS[kind]
    weights = task_weights(head, shape=shape)
    vocabulary, checks = Vocabulary(PIECES, cased=False), list[tuple[str, float]]()
    out = tmp_path / "out"
    card = make_task_card(shape, head, out, 16, TaskProvenance("toy", BaseSummary("base", on_hub=False)))
    verify = partial(verify_fine_tuned, shape=shape, head=head, state=weights, logits_of=compute_logits)
    write_fine_tuned(out, shape, head, weights, vocabulary, card, {}, 16, check=lambda at: checks.extend(verify(at)))
    read, read_head, state = read_fine_tuned(out)
    assert (read, read_head) == (shape.encoder, head)
    assert same(state, weights)
    if sees == "before" and kind in ("spans", "tags"):  # transformers computes these one way, and agrees
        assert [reader for reader, _ in checks] == ["Cloze", "transformers"]
        assert "No class" not in card
        return
    assert [reader for reader, _ in checks] == ["Cloze"]
    assert "No class of transformers" in card
    assert "library_name" not in card
    with pytest.raises(ValueError, match="cloze-"):
        AutoModel.from_pretrained(out)
