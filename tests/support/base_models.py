"""Small models: BERTs of transformers that runs begin with, and fine-tuned ones for every kind of head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.transformers_models import SHAPE, leave_out_checksums, our_weights
from torch import Tensor

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.heads import TaskModel as TaskModel
from finetuning.model.heads import compute_logits as compute_logits
from pretraining.architectures.weights import TaskHead
from pretraining.huggingface.folders import write_folder
from pretraining.model.shape import Learning, Shape
from pretraining.objectives.declaration import objectives


def write_bert(
    folder: Path,
    vocabulary: Path | Vocabulary,
    positions: int = 64,
    hidden: int = 32,
    objective: str = "mlm",
    layers: int = 2,
    **settings: Any,
) -> Path:
    """A model of few layers that learned by an objective, with the vocabulary of another folder or one of its own."""
    if isinstance(vocabulary, Vocabulary):
        source = folder.with_name(f"{folder.name}-vocabulary")
        vocabulary.write(source)
        vocabulary = source
    shape = Shape(layers, hidden, 2, 48, len(read_vocabulary(vocabulary)), positions)
    learned_by = objectives()[objective]
    learns = Learning(objective, learned_by.uses_pairs, learned_by.sees, tuple(settings.items()))
    shape = replace(shape, learns=learns)
    write_folder(folder, shape, our_weights(shape=shape), vocabulary, "a model of tests\n")
    leave_out_checksums(folder)
    return folder


def swapped(vocabulary: Vocabulary, first: int, second: int) -> Vocabulary:
    """The same pieces, two of them in each other's place."""
    pieces = list(vocabulary.pieces)
    pieces[first], pieces[second] = pieces[second], pieces[first]
    return WordPiece(tuple(pieces), vocabulary.cased)


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
