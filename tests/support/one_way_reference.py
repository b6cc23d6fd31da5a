"""A language model in one direction in plain PyTorch, sequence by sequence: the reference for ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model.rows import Rows
from pretraining.model.shape import Shape

CLS, SEP, MASK = 2, 3, 4


def random_rows(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> tuple[Rows, list[list[int]]]:
    """Examples as they stand in shards, with masks; and the texts that they hide."""
    draw = np.random.default_rng(seed)
    texts = [[CLS, *draw.integers(5, vocabulary, length - 2), SEP] for length in lengths]
    places = [np.sort(draw.choice(length - 2, max(1, length // 6), replace=False)) + 1 for length in lengths]
    hidden = [np.array(text) for text in texts]
    for pieces, masked in zip(hidden, places, strict=True):
        pieces[masked] = draw.choice([MASK, 7, 9], len(masked))
    rows = Rows(
        where=np.stack([np.zeros(len(lengths), np.int64), np.arange(len(lengths))], axis=1),
        lengths=np.array(lengths),
        pieces=np.concatenate(hidden),
        boundaries=np.array([draw.integers(2, length + 1) for length in lengths]),
        random_next=draw.integers(0, 2, len(lengths)),
        predictions=np.array([len(masked) for masked in places]),
        positions=np.concatenate(places),
        labels=np.concatenate([np.array(text)[masked] for text, masked in zip(texts, places, strict=True)]),
    )
    return rows, [[int(piece) for piece in text] for text in texts]


def reference_states(weights: Mapping[str, Tensor], shape: Shape, text: Sequence[int], boundary: int) -> Tensor:
    """The last hidden states of one sequence whose second segment begins at `boundary`: no dropout."""
    pieces, places = torch.tensor(text), torch.arange(len(text))
    seen = {"both": places == places, "before": places <= places[:, None], "after": places >= places[:, None]}
    x = weights["embeddings.word.weight"][pieces] + weights["embeddings.position.weight"][places]
    x = x + weights["embeddings.segment.weight"][(places >= boundary).long()]
    x = _norm(weights, "embeddings.norm", x, shape)
    for layer in range(shape.layers):
        x = _layer(weights, f"layers.{layer}", x, shape, seen[shape.learns.sees])
    return x


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor, shape: Shape) -> Tensor:
    return F.layer_norm(x, (shape.hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], shape.epsilon)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _layer(weights: Mapping[str, Tensor], name: str, x: Tensor, shape: Shape, seen: Tensor) -> Tensor:
    heads = _linear(weights, f"{name}.attention.qkv", x).view(len(x), 3, shape.heads, -1)
    query, key, value = heads.permute(1, 2, 0, 3)
    scores = query @ key.transpose(1, 2) / (shape.hidden / shape.heads) ** 0.5
    context = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1).flatten(1)
    x = _norm(weights, f"{name}.attention.norm", x + _linear(weights, f"{name}.attention.output", context), shape)
    inner = F.gelu(_linear(weights, f"{name}.feed_forward.inner", x))
    x = x + _linear(weights, f"{name}.feed_forward.output", inner)
    return _norm(weights, f"{name}.feed_forward.norm", x, shape)


def reference_logits(weights: Mapping[str, Tensor], shape: Shape, text: Sequence[int], boundary: int) -> Tensor:
    """Logits of every piece that is predicted, in the order of the text: (length - 1 or length - 2, vocabulary)."""
    hidden = reference_states(weights, shape, text, boundary)
    return head_logits(weights, shape, hidden[:-1] if shape.learns.sees == "before" else hidden[2:])


def head_logits(weights: Mapping[str, Tensor], shape: Shape, asked: Tensor) -> Tensor:
    """The logits of the head that predicts pieces, (m, vocabulary)."""
    transformed = F.gelu(_linear(weights, "masked_head.transform", asked))
    decoder = weights["embeddings.word.weight"], weights["masked_head.bias"]
    return F.linear(_norm(weights, "masked_head.norm", transformed, shape), *decoder)[:, : shape.vocabulary]


def next_logits(weights: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The logits of whether B follows A, (2,), from the states of one sequence."""
    return _linear(weights, "next_head", torch.tanh(_linear(weights, "pooler", states[0])))


def reference_loss(logits: Tensor, text: Sequence[int], shape: Shape) -> Tensor:
    """The sum of the cross-entropies: of all pieces but [CLS] and, from right to left, of the last."""
    predicted = text[1:] if shape.learns.sees == "before" else text[1:-1]
    return F.cross_entropy(logits, torch.tensor(predicted), reduction="sum")
