"""A BiLSTM on packed rows against PyTorch's on every sequence alone: on an encoder that learns with it, on layers of a
frozen one, and on ELMo's two side by side, whose layers are mixed by learned shares."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from support.fine_tuned_models import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE
from torch import Tensor

from data_prep.common.arrays import Array
from finetuning.inputs import Encoded
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.model.heads import TaskBatch, TaskModel, build_bilstm, initialize_bilstm, read_both_ways
from finetuning.running.batches import pack
from finetuning.settings import BiLstm, Features, LayerChoice
from pretraining.architectures.declaration import build_encoder
from pretraining.architectures.weights import KINDS, Kind
from pretraining.model.shape import Shape

QUIET = replace(SHAPE, dropout=0.0, attention_dropout=0.0)
SIZES = BiLstm(hidden=8, depth=2)


@settings(max_examples=8)
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


def logits_alone(
    model: TaskModel | FeatureModel, items: Encoded, chosen: Array, read: Callable[[TaskBatch], list[Tensor]]
) -> Tensor:
    """What the head says of one item after another, whose states are read by the module itself."""
    rows, kind = [], model.kind
    for item in chosen:
        states = read(pack(items, np.array([item])))
        if kind not in ("spans", "tags"):
            states = [part.max(0, keepdim=True).values for part in states]
        rows.append(model.head(torch.cat(states)))
    logits = torch.cat(rows)
    return logits.view(-1, 2) if kind == "choice" else logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_says_what_a_plain_one_does_of_items_in_any_company_and_all_learns(kind: Kind) -> None:
    model, items, chosen = model_of(kind), items_of(kind), np.array([2, 0, 3])
    assert not hasattr(model, "pooler")
    model(pack(items, np.arange(len(LENGTHS)))).loss.backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {"embeddings.word.weight", *(f"lstm.{name}" for name, _ in model.lstm.named_parameters())} <= moved
    model.eval()

    def read(batch: TaskBatch) -> list[Tensor]:
        parts = [model.lstm(part)[0] for part in torch.split(model.encode(batch), list(batch.lengths))]
        return [parts[0][batch.words]] if kind == "tags" else parts

    with torch.no_grad():
        ours, wanted = model.logits(pack(items, chosen)), logits_alone(model, items, chosen, read)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


# ELMo's scheme

FORWARD, BACKWARD = SHAPE.change_learning(sees="before"), replace(SHAPE, hidden=16).change_learning(sees="after")
MIX = Features(layers="mix", hidden=8, depth=2)


def mix_of(kind: Kind) -> FeatureModel:
    """A model whose shares of the layers differ."""
    torch.manual_seed(1)
    encoders = [EncoderWeights(FORWARD, {}).fill_missing(1), EncoderWeights(BACKWARD, {}).fill_missing(2)]
    model = FeatureModel(encoders, head_of(kind), MIX)
    with torch.no_grad():
        model.mix.copy_(torch.tensor([0.3, -1.0, 0.7]))
        model.scale.fill_(1.7)
    return model.eval()


def mixed(model: FeatureModel, batch: TaskBatch) -> Tensor:
    """The formula as it stands in the paper: γ·Σ softmax(s)_j·[h_j of one; h_j of the other]."""
    states = []
    for shape, frozen in zip((FORWARD, BACKWARD), model.frozen.encoders, strict=True):
        encoder = build_encoder(shape)
        encoder.load_state_dict(frozen.state_dict())
        states.append(list(encoder.eval().encode_layers(batch)))
    shares = torch.exp(model.mix) / torch.exp(model.mix).sum()
    total = torch.zeros(len(batch.pieces), FORWARD.hidden + BACKWARD.hidden)
    for share, one, other in zip(shares, *states, strict=True):
        total += share * torch.cat([one, other], 1)
    return model.scale * total


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_mixed_and_read_as_the_formula_says_and_shares_learn(kind: Kind) -> None:
    model, items, chosen = mix_of(kind), items_of(kind), np.array([2, 0, 3])

    def read(batch: TaskBatch) -> list[Tensor]:
        parts = torch.split(mixed(model, batch), list(batch.lengths))
        return [model.lstm(part[batch.words] if kind == "tags" else part)[0] for part in parts]

    with torch.no_grad():
        ours, wanted = model.logits(pack(items, chosen)), logits_alone(model, items, chosen, read)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    model(pack(items, np.arange(len(LENGTHS)))).loss.backward()
    for parameter in (model.mix, model.scale, *model.lstm.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.any()
    assert not any(parameter.requires_grad for encoder in model.frozen.encoders for parameter in encoder.parameters())
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"mix", "scale", "lstm", "head"}


# Frozen features: every choice of layers


DEEP = Shape(5, 16, 2, 24, 99, 32).change_learning(pairs=False)
LAYERS = [layers for layers in get_args(LayerChoice) if layers]


@pytest.mark.parametrize("layers", LAYERS)
def test_features_are_the_states_that_they_are_called_and_the_head_learns_alone(layers: LayerChoice) -> None:
    torch.manual_seed(1)
    encoder = build_encoder(DEEP).initialize(1).eval()
    before = {name: weight.clone() for name, weight in encoder.state_dict().items()}
    model = FeatureModel([EncoderWeights(DEEP, before)], head_of("tags"), Features(layers=layers, hidden=8))
    batch = pack(items_of("tags"), np.arange(len(LENGTHS)))
    with torch.no_grad():
        states = list(encoder.encode_layers(batch))
        assert len(states) == DEEP.layers + 1
        torch.testing.assert_close(states[-1], encoder.encode(batch))
        wanted = {"embeddings": states[0], "second-to-last": states[4], "last": states[5]}
        wanted |= {"sum-all": torch.stack(states[1:]).sum(0), "weighted-all": torch.stack(states[1:]).mean(0)}
        last_four = {
            "weighted-last-four": torch.stack(states[2:]).mean(0),
            "concat-last-four": torch.cat(states[2:], 1),
        }
        wanted |= {**last_four, "mix": torch.stack(states).mean(0)}
        torch.testing.assert_close(model.compute_features(batch), wanted[layers][batch.words])
    model(batch).loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    assert not [name for name in gradients if name.startswith(("embeddings", "layers"))]
    assert all(torch.equal(model.frozen.encoders[0].state_dict()[name], weight) for name, weight in before.items())
