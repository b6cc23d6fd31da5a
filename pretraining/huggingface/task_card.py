"""The model card of a fine-tuned model: what it was made from and for, on how much data, how, and its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pretraining.huggingface.model_card import BaseSummary, as_text, table
from pretraining.huggingface.weights import Kind, TaskHead, list_weights
from pretraining.model.shape import Shape

USES: dict[Kind, tuple[str, str]] = {
    "classes": ("text-classification", "one label of a text or a pair"),
    "labels": ("text-classification", "any of several labels of a text or a pair"),
    "score": ("text-classification", "a number for a text or a pair"),
    "choice": ("multiple-choice", "which of several texts goes on best"),
    "spans": ("question-answering", "where in a text the answer to a question is"),
    "tags": ("token-classification", "a tag for every word"),
}
"""What the hub calls the use of a head, and what it says."""


@dataclass(frozen=True)
class TaskProvenance:
    """How a fine-tuned model came to be."""

    task: str
    """The name of the task."""
    base: BaseSummary
    """The model that was fine-tuned."""
    pretrained: bool = True
    """Whether its weights were taken; otherwise only its sizes and its vocabulary were."""
    items: Mapping[str, int] = field(default_factory=dict)
    """Items of each split: train, dev."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The scores of each split that was scored, as fractions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters by their names: learning rate, batch, epochs, seed."""
    licence: str | None = None
    """The licence, as the hub spells it."""


def task_card(shape: Shape, head: TaskHead, folder: Path, length: int, made: TaskProvenance) -> str:
    """Writes the card of a fine-tuned model that lies in a folder; `length` is the longest sequence in pieces."""
    begun = "The sizes and the vocabulary, but not the weights, are those of" if not made.pretrained else "Made from"
    parts = [
        _front_matter(head, made),
        f"# BERT for {as_text(made.task)}\n\nA BERT encoder that says {USES[head.kind][1]}, fine-tuned with Cloze. "
        f"{begun} {as_text(made.base)}.",
        table(["", ""], _facts(shape, head, length, made)),
        _loading(head, folder, length),
    ]
    if made.items:
        parts.append("## Data\n\n" + table(["split", "items"], made.items.items()))
    if made.settings:
        parts.append("## Training\n\n" + table(["setting", "value"], made.settings.items()))
    if made.scores:
        rows = [
            (split, name, f"{value:.4f}") for split, scores in made.scores.items() for name, value in scores.items()
        ]
        parts.append("## Scores\n\n" + table(["split", "score", "value"], rows))
    return "\n\n".join(parts) + "\n"


def _front_matter(head: TaskHead, made: TaskProvenance) -> str:
    """What the hub reads of a card."""
    use = USES[head.kind][0]
    base = made.base.hub_model if made.pretrained else None
    content = ModelCardData(
        library_name="transformers", pipeline_tag=use, tags=["bert", use], license=made.licence, base_model=base
    )
    return f"---\n{content.to_yaml()}\n---"


def _facts(shape: Shape, head: TaskHead, length: int, made: TaskProvenance) -> Iterator[tuple[str, Any]]:
    yield "parameters", sum(math.prod(weight.size) for weight in list_weights(shape, head))
    yield "layers", shape.layers
    yield "hidden size", shape.hidden
    if head.labels:
        yield "labels", ", ".join(head.labels)
    yield "longest sequence", f"{length:,} pieces"
    yield "licence", made.licence or "not specified"


def _loading(head: TaskHead, folder: Path, length: int) -> str:
    kind = head.architecture.replace("Bert", "AutoModel", 1)
    name = folder.name if folder.is_absolute() else str(folder)
    place = json.dumps(name, ensure_ascii=False)
    return "\n".join(
        [
            "## Loading\n",
            "```python",
            f"from transformers import {kind}, AutoTokenizer\n",
            f"tokenizer = AutoTokenizer.from_pretrained({place})",
            f"model = {kind}.from_pretrained({place})",
            "```\n",
            f"With `truncation=True` the tokenizer cuts texts at {length:,} pieces. With Cloze:\n",
            "```console",
            f"$ python finetuning/predict.py {name}",
            "```",
        ]
    )
