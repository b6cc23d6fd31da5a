"""Fine-tuned models of tests: one for every kind of head, in both worlds."""

from __future__ import annotations

from typing import Any

import torch
from support.transformers_models import SHAPE
from torch import Tensor

from finetuning.model.heads import TaskModel, compute_logits
from pretraining.architectures.weights import TaskHead
from pretraining.model.shape import Shape

__all__ = ["HEADS", "MNLI", "TaskModel", "compute_logits", "task_weights"]

MNLI = TaskHead("classes", ("contradiction", "entailment", "neutral"))
HEADS = {
    "classes": MNLI,
    "labels": TaskHead("labels", ("anger", "joy")),
    "one label": TaskHead("labels", ("joy",)),
    "score": TaskHead("score"),
    "choice": TaskHead("choice"),
    "spans": TaskHead("spans"),
    "tags": TaskHead("tags", ("O", "B-PER", "I-PER", "B-LOC")),
}
"""Heads of every kind, and several labels with a single one, which transformers could take for a number."""


def task_weights(head: TaskHead, seed: int = 0, shape: Shape = SHAPE) -> dict[str, Tensor]:
    """Weights that all matter to the logits."""
    generator = torch.Generator().manual_seed(seed)
    model = TaskModel(shape, head).initialize(seed)
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        value.add_(torch.randn(value.shape, generator=generator), alpha=0.2)
        if name == "embeddings.word.weight":
            value[shape.vocabulary :] = 0
    return state
