"""The model that all runs of a command begin with, and the folders that they leave."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from finetuning.model.heads import logits_of
from finetuning.model.models import summary_of
from finetuning.places import MODEL
from finetuning.running.loop import Run
from finetuning.scale import Scale
from finetuning.settings import Dropout
from finetuning.tasks.task import Column, Task
from pretraining.checkpoint.models import Model
from pretraining.huggingface.folders import write_fine_tuned
from pretraining.huggingface.model_card import TaskProvenance, task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.huggingface.weights import list_weights
from pretraining.model.shape import Shape

TOLD = ("learning_rate", "batch", "epochs", "warmup", "seed")
"""Settings that a model card tells."""
SAMPLED = 1024
"""Numbers of a weight that stand for all of them in a checksum."""


@dataclass(frozen=True)
class Base:
    """A model to begin with: its weights, or from scratch fresh ones of the same sizes."""

    model: Model
    from_scratch: bool = False

    def shape_for(self, dropout: Dropout) -> Shape:
        """Its sizes, with what the settings say of dropout."""
        given = {"dropout": dropout.hidden, "attention_dropout": dropout.attention}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self.model.shape, **values)

    def weights_for(self, task: Task) -> Mapping[str, Tensor]:
        """The weights that a run of a task begins with."""
        if self.from_scratch:
            return {}
        wanted = {weight.ours for weight in list_weights(self.model.shape, task.head)}
        return {name: weight for name, weight in self.model.encoder.items() if name in wanted}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells it from others, in JSON: another training of the same name has another checksum."""
        seen = hashlib.sha256(f"{self.model.vocabulary.sha256} {asdict(self.model.shape)}".encode())
        for name, weight in sorted({} if self.from_scratch else self.model.encoder.items()):
            seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
        return {"from_scratch": self.from_scratch, "checksum": seen.hexdigest()[:16]}

    def write(self, run: Run, weights: Mapping[str, Tensor], use: Mapping[str, Any]) -> None:
        """Writes what a run has learned as a folder of transformers, once it is read back with the same logits; `use`
        is what must be known to use it."""
        task, shape, settings = run.task, run.engine.model.shape, run.settings
        made = TaskProvenance(
            task.name,
            summary_of(self.model),
            pretrained=not self.from_scratch,
            items={"train": len(task.train), **{name: len(items) for name, items in task.dev.items()}},
            scores=run.state.scores,
            settings={name: getattr(settings, name) for name in TOLD},
        )
        card = task_card(shape, task.head, run.folder.parent / MODEL, settings.length, made)
        use, vocabulary = {"task": task.name, **use}, self.model.vocabulary

        def check(folder: Path) -> None:
            verify_fine_tuned(folder, shape, task.head, weights, logits_of)

        write_fine_tuned(
            run.folder / MODEL, shape, task.head, weights, vocabulary, card, use, settings.length, check=check
        )


def identity_of(task: Task) -> dict[str, str]:
    """What tells the data of a task from others: how many rows every split has, and a checksum of them; and the scale
    of its numbers, on which a run that was begun without one cannot go on."""
    data = {split: _describe(task.content(split)) for split in ("train", *task.dev)}
    return data if task.scale == Scale() else {**data, "scale": f"{task.scale.mean:.9g} ± {task.scale.spread:.9g}"}


def _describe(columns: Sequence[Column]) -> str:
    seen = hashlib.sha256()
    for column in columns:
        if isinstance(column, np.ndarray):
            seen.update(column.tobytes())
        else:
            seen.update("\0".join(column).encode(errors="surrogatepass"))
    return f"{len(columns[0]):,} rows, checksum {seen.hexdigest()[:16]}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What is not the same in two nested tables, each with its name and both values."""
    found = []
    for name in {**now, **before}:
        then, new = before.get(name, {}), now.get(name, {})
        if isinstance(then, Mapping) and isinstance(new, Mapping):
            found += differences(then, new, f"{within}{name}.")
        elif then != new:
            found.append(f"{within}{name}: {_spelled(then)} -> {_spelled(new)}")
    return found


def _spelled(value: Any) -> str:
    return "none" if value in ({}, None, "") else str(value)
