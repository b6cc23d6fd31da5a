"""GPT's auxiliary loss: the language head goes on to learn, by every piece but the first from those before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.task_items import LENGTHS, head_of, items_of
from support.transformers_models import SHAPE
from torch import Tensor

from finetuning.model.heads import TaskModel
from finetuning.running.batches import TaskBatches, pack
from finetuning.running.loop import compute_minimised
from pretraining.huggingface.weights import KINDS, Kind

ONE_WAY = replace(SHAPE, sees="before", objective="ltr", dropout=0.0, attention_dropout=0.0)


def model_of(kind: Kind) -> TaskModel:
    return TaskModel(ONE_WAY, head_of(kind), language=True).initialize(3)


def plain(model: TaskModel, hidden: Tensor, pieces: Tensor) -> Tensor:
    """The loss of one sequence, piece by piece, by PyTorch alone."""
    head = model.masked_head
    inner = F.layer_norm(
        F.gelu(F.linear(hidden, head.transform.weight, head.transform.bias)),
        (SHAPE.hidden,),
        head.norm.weight,
        head.norm.bias,
        SHAPE.epsilon,
    )
    logits = F.linear(inner, model.embeddings.word.weight, head.bias)[:, : SHAPE.vocabulary]
    total = torch.zeros(())
    for place in range(1, len(pieces)):
        total = total - torch.log_softmax(logits[place - 1], 0)[pieces[place]]
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_every_piece_but_the_first_is_predicted_as_by_pytorch_alone(kind: Kind) -> None:
    model, batch = model_of(kind), pack(items_of(kind), np.array([2, 0, 1]))
    ours = model(batch).language
    hidden = torch.split(model.encode(batch), list(batch.lengths))
    pieces = torch.split(batch.pieces, list(batch.lengths))
    wanted = torch.stack([plain(model, *each) for each in zip(hidden, pieces, strict=True)]).sum()
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-4)
    names = (
        "masked_head.bias",
        "masked_head.transform.weight",
        "embeddings.word.weight",
        "layers.0.attention.qkv.weight",
    )
    weights = [model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(ours, weights, retain_graph=True)
    for gradient, expected in zip(gradients, torch.autograd.grad(wanted, weights), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_share_of_it_is_added_to_the_loss_of_the_task(share: float) -> None:
    """L2 + λ · L1, each of which is a mean: of labels, and of pieces."""
    model, batch = model_of("classes"), pack(items_of("classes"), np.array([2, 0, 1]))
    output, predicted = model(batch), sum(batch.lengths) - len(batch.lengths)
    assert batch.labels is not None
    found = compute_minimised(output, TaskBatches((batch,), 3, len(batch.labels), predicted), share)
    hidden, pieces = (torch.split(each, list(batch.lengths)) for each in (model.encode(batch), batch.pieces))
    language = torch.stack([plain(model, *each) for each in zip(hidden, pieces, strict=True)]).sum() / predicted
    wanted = F.cross_entropy(output.logits, batch.labels) + share * language
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_nothing_is_predicted_from_items_without_labels_nor_in_evaluation() -> None:
    model, items = model_of("classes"), items_of("classes")
    model(pack(items, np.arange(2), labelled=False)).language.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert float(model.eval()(pack(items, np.arange(len(LENGTHS)))).language) == 0


def test_its_logits_are_never_whole() -> None:
    assert model_of(KINDS[0]).masked_head.at_once is not None
