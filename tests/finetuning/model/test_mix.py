"""ELMo's scheme: two frozen encoders side by side, whose layers are mixed by learned shares, against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.task_items import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE
from torch import Tensor

from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.model.heads import TaskBatch
from finetuning.running.batches import pack
from finetuning.settings import Features
from pretraining.huggingface.weights import KINDS, Kind
from pretraining.model.encoder import Encoder

FORWARD, BACKWARD = replace(SHAPE, sees="before"), replace(SHAPE, sees="after", hidden=16)
MIX = Features(layers="mix", hidden=8, depth=2)


def model_of(kind: Kind) -> FeatureModel:
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
        encoder = Encoder(shape)
        encoder.load_state_dict(frozen.state_dict())
        states.append(list(encoder.eval().encode_layers(batch)))
    shares = torch.exp(model.mix) / torch.exp(model.mix).sum()
    total = torch.zeros(len(batch.pieces), FORWARD.hidden + BACKWARD.hidden)
    for share, one, other in zip(shares, *states, strict=True):
        total += share * torch.cat([one, other], 1)
    return model.scale * total


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_mixed_and_read_as_the_formula_says(kind: Kind) -> None:
    model, items = model_of(kind), items_of(kind)
    chosen = np.array([2, 0, 3])
    with torch.no_grad():
        ours = model.logits(pack(items, chosen))
        rows = []
        for item in chosen:
            batch = pack(items, np.array([item]))
            sequences = torch.split(mixed(model, batch), list(batch.lengths))
            if kind == "tags":
                sequences = (sequences[0][batch.words],)
            read = [model.lstm(sequence)[0] for sequence in sequences]
            if kind not in ("spans", "tags"):
                read = [sequence.max(0, keepdim=True).values for sequence in read]
            rows.append(model.head(torch.cat(read)))
    wanted = torch.cat(rows)
    torch.testing.assert_close(ours, wanted.view(-1, 2) if kind == "choice" else wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_learn_and_encoders_do_not(kind: Kind) -> None:
    model = model_of(kind)
    model(pack(items_of(kind), np.arange(len(LENGTHS)))).loss.backward()
    for parameter in (model.mix, model.scale, *model.lstm.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.any()
    assert not any(parameter.requires_grad for encoder in model.frozen.encoders for parameter in encoder.parameters())
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"mix", "scale", "lstm", "head"}
