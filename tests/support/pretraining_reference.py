"""Random batches, and the same through transformers' own model, padded: the reference for ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import BertConfig

from benchmarks.peer import pad_batch
from pretraining.model.batch import PretrainingBatch
from pretraining.model.encoder import PretrainingModel
from pretraining.model.rows import Rows
from pretraining.model.shape import Shape
from pretraining.objectives.mlm import OBJECTIVE as MLM

__all__ = ["pad_batch"]

SMALL = Shape(layers=2, hidden=48, heads=4, intermediate=96, vocabulary=101, positions=96)


def random_rows(lengths: Sequence[int], vocabulary: int, seed: int = 0, first: int = 0) -> Rows:
    """Examples of these lengths. No piece is 0: transformers gives no gradient to that one's embedding."""
    draw = np.random.default_rng(seed)
    predicted = [np.sort(draw.choice(n, max(1, round(n * 0.15)), replace=False)) for n in lengths]
    num_predictions = sum(map(len, predicted))
    return Rows(
        where=np.stack([np.zeros(len(lengths), np.int64), first + np.arange(len(lengths))], axis=1),
        lengths=np.array(lengths),
        pieces=draw.integers(1, vocabulary, sum(lengths)),
        boundaries=np.array([draw.integers(1, length + 1) for length in lengths]),
        random_next=draw.integers(0, 2, len(lengths)),
        predictions=np.array([len(each) for each in predicted]),
        positions=np.concatenate(predicted),
        labels=draw.integers(0, vocabulary, num_predictions),
    )


def random_batch(lengths: Sequence[int], vocabulary: int, seed: int = 0, first: int = 0) -> PretrainingBatch:
    """These examples as a batch for masked pieces."""
    return MLM.batch(random_rows(lengths, vocabulary, seed, first))


def make_uneven(model: PretrainingModel) -> PretrainingModel:
    """Draws weights so large that attention is far from uniform."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.initialize(1).parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.embeddings.word.weight[model.shape.vocabulary :] = 0
    return model


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def gradients(model: Module) -> dict[str, Tensor]:
    """The gradients of all parameters of a model, by name."""
    return {name: gradient(parameter) for name, parameter in model.named_parameters()}


def their_config(shape: Shape, **more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=shape.positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.attention_dropout,
        layer_norm_eps=shape.epsilon,
        **more,
    )


def mean_loss(model: PretrainingModel, batch: PretrainingBatch) -> Tensor:
    """As transformers means it: mean over predictions plus mean over sequences."""
    losses = model(batch)
    mean: Tensor = losses.masked / len(batch.labels) + losses.next_sentence / len(batch.lengths)
    return mean
