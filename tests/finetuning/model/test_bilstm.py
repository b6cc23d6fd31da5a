"""A BiLSTM on packed rows against PyTorch's on every sequence alone, and on top of an encoder that learns with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from support.task_items import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE

from finetuning.model.bilstm import build_bilstm, initialize_bilstm, read_both_ways, take_maximum
from finetuning.model.heads import TaskModel
from finetuning.running.batches import pack
from finetuning.settings import BiLstm
from pretraining.huggingface.weights import KINDS, Kind

QUIET = replace(SHAPE, dropout=0.0, attention_dropout=0.0)
SIZES = BiLstm(hidden=8, depth=2)


@settings(deadline=None, max_examples=20)
@given(some.lists(some.integers(0, 7), min_size=1, max_size=6))
def test_sequences_are_read_as_each_alone(lengths: list[int]) -> None:
    torch.manual_seed(1)
    lstm, rows = build_bilstm(5, 8, 2), torch.randn(sum(lengths), 5, requires_grad=True)
    ours = read_both_ways(lstm, rows, lengths)
    alone = [lstm(part)[0] for part in torch.split(rows, lengths) if len(part)]
    assert ours.shape == (sum(lengths), 8)
    if alone:
        torch.testing.assert_close(ours, torch.cat(alone))
        wish = torch.randn(ours.shape)
        (gradient,) = torch.autograd.grad((ours * wish).sum(), rows)
        (wanted,) = torch.autograd.grad((torch.cat(alone) * wish).sum(), rows)
        torch.testing.assert_close(gradient, wanted)


def test_a_seed_decides_the_fresh_weights_whatever_was_drawn_before() -> None:
    first, second, other = (build_bilstm(5, 8, 2) for _ in range(3))
    for lstm, seed in ((first, 3), (second, 3), (other, 4)):
        torch.rand(1)
        initialize_bilstm(lstm, seed)
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    assert all(float(weight.detach().abs().max()) <= 0.5 for weight in first.parameters())  # 1 / √4


def model_of(kind: Kind) -> TaskModel:
    return TaskModel(QUIET, head_of(kind), bilstm=SIZES).initialize(3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_says_what_a_plain_one_does_of_items_in_any_company(kind: Kind) -> None:
    """The reference reads one item after another, by the module itself."""
    model, items = model_of(kind).eval(), items_of(kind)
    chosen = np.array([2, 0, 3])
    with torch.no_grad():
        ours = model.logits(pack(items, chosen))
        rows = []
        for item in chosen:
            batch = pack(items, np.array([item]))
            read = [model.lstm(part)[0] for part in torch.split(model.encode(batch), list(batch.lengths))]
            if kind not in ("spans", "tags"):
                read = [part.max(0, keepdim=True).values for part in read]
            whole = torch.cat(read)
            rows.append(model.head(whole[batch.words] if kind == "tags" else whole))
    wanted = torch.cat(rows)
    torch.testing.assert_close(ours, wanted.view(-1, 2) if kind == "choice" else wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_learns(kind: Kind) -> None:
    model, items = model_of(kind), items_of(kind)
    assert not hasattr(model, "pooler")
    model(pack(items, np.arange(len(LENGTHS)))).loss.backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {"embeddings.word.weight", *(f"lstm.{name}" for name, _ in model.lstm.named_parameters())} <= moved


def test_the_highest_of_a_sequence_is_that_of_its_own_rows() -> None:
    rows = torch.randn(sum(LENGTHS), 3)
    wanted = torch.stack([part.max(0).values for part in torch.split(rows, LENGTHS)])
    assert torch.equal(take_maximum(rows, LENGTHS), wanted)
