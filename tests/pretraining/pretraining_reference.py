"""Random batches, and the same through transformers' own model, padded: the reference for ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from pretraining.batches import Batch
from pretraining.interchange import to_transformers
from pretraining.model import Bert
from pretraining.shape import Shape

SMALL = Shape(layers=2, hidden=48, heads=4, intermediate=96, vocabulary=101, positions=96)


def random_batch(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> Batch:
    """Sequences of these lengths, some of their pieces to be predicted."""
    draw = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(length) for length in lengths])
    boundaries = np.repeat([draw.integers(1, length + 1) for length in lengths], lengths)
    chosen = np.concatenate(
        [
            start + np.sort(draw.choice(n, max(1, round(n * 0.15)), replace=False))
            for start, n in zip(starts, lengths, strict=False)
        ]
    )
    return Batch(
        pieces=torch.from_numpy(draw.integers(1, vocabulary, len(positions))),
        segments=torch.from_numpy((positions >= boundaries).astype(np.int64)),
        positions=torch.from_numpy(positions),
        starts=torch.from_numpy(starts.astype(np.int32)),
        chosen=torch.from_numpy(chosen),
        labels=torch.from_numpy(draw.integers(0, vocabulary, len(chosen))),
        random_next=torch.from_numpy(draw.integers(0, 2, len(lengths))),
        lengths=tuple(lengths),
        examples=np.stack([np.zeros(len(lengths), np.int64), np.arange(len(lengths))], axis=1),
    )


def padded(batch: Batch, length: int | None = None) -> dict[str, Tensor]:
    """What transformers' BertForPreTraining is given for it."""
    length = length or max(batch.lengths)
    ids, segments, mask = (torch.zeros(len(batch.lengths), length, dtype=torch.int64) for _ in range(3))
    labels = torch.full_like(ids, -100)
    flat = torch.full_like(batch.pieces, -100)
    flat[batch.chosen] = batch.labels
    for row, (start, size) in enumerate(zip(batch.starts.tolist(), batch.lengths, strict=False)):
        piece = slice(start, start + size)
        ids[row, :size], segments[row, :size], mask[row, :size] = batch.pieces[piece], batch.segments[piece], 1
        labels[row, :size] = flat[piece]
    return {
        "input_ids": ids,
        "token_type_ids": segments,
        "attention_mask": mask,
        "labels": labels,
        "next_sentence_label": batch.random_next,
    }


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


def their_model(model: Bert) -> BertForPreTraining:
    """transformers' model with our weights."""
    theirs = BertForPreTraining(their_config(model.shape))
    state = to_transformers(model.state_dict(), model.shape)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    theirs.tie_weights()
    return theirs


def mean_loss(model: Bert, batch: Batch) -> Tensor:
    """As transformers means it: mean over predictions plus mean over sequences."""
    losses = model(batch)
    return losses.masked / len(batch.labels) + losses.next / len(batch.lengths)
