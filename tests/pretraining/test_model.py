"""The model against transformers' own, and its fused kernels against PyTorch's operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pretraining_reference import SMALL, mean_loss, padded, random_batch, their_model

from pretraining import kernels
from pretraining.interchange import from_transformers
from pretraining.model import Bert

LENGTHS = (5, 70, 96, 17, 64, 1, 33)


@pytest.fixture(params=["kernels", "torch"])
def either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with our kernels, once with PyTorch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "usable", lambda tensor: False)
    else:
        assert kernels.usable(torch.zeros(1)), "no C++ compiler"
    return str(request.param)


def small_model(**changes: float) -> Bert:
    """With weights large enough that attention is far from uniform."""
    model = Bert(replace(SMALL, **changes)).initialize(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.embeddings.word.weight[SMALL.vocabulary :] = 0
    return model


def test_logits_are_those_of_transformers(either_path: str) -> None:
    model, batch = small_model().eval(), random_batch(LENGTHS, SMALL.vocabulary)
    theirs = their_model(model).eval()(**padded(batch))
    masked, following = model.heads(model.encode(batch), batch)
    chosen = padded(batch)["labels"] != -100
    torch.testing.assert_close(masked, theirs.prediction_logits[chosen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(following, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_are_those_of_transformers(either_path: str) -> None:
    model, batch = small_model(dropout=0.0, attention_dropout=0.0), random_batch(LENGTHS, SMALL.vocabulary)
    theirs = their_model(model)
    loss, reference = mean_loss(model, batch), theirs(**padded(batch)).loss
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
    loss.backward()
    reference.backward()
    theirs_as_ours, _ = from_transformers({name: p.grad for name, p in theirs.named_parameters()}, SMALL)[:2]
    for name, parameter in model.named_parameters():
        rows = SMALL.vocabulary if "word" in name or name == "masked_head.bias" else None
        torch.testing.assert_close(
            parameter.grad[:rows], theirs_as_ours[name][:rows], rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}"
        )
