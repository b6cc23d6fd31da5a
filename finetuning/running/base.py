"""The model that all runs of a command begin with, and the folders that they write of what they have learned.

Of a BiLSTM that learned on frozen features the folder has its own weights alone. The encoder stays in its folder, or on
the hub, and is recognised by its checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.features import FeatureModel
from finetuning.model.heads import logits_of
from finetuning.model.models import find_model, summary_of
from finetuning.results import MODEL
from finetuning.running.loop import Tuner, build_model
from finetuning.settings import DropoutShares, FineTuning
from finetuning.tasks.task import Task
from pretraining.checkpoint.models import Model
from pretraining.huggingface.folders import CONFIG, TASK, WEIGHTS, read_task, write_bare, write_fine_tuned
from pretraining.huggingface.model_card import TaskProvenance, task_card
from pretraining.huggingface.verify import verify_fine_tuned
from pretraining.huggingface.weights import TaskHead, list_weights
from pretraining.huggingface.weights_file import read_weights
from pretraining.model.shape import Shape

TOLD = ("learning_rate", "batch", "epochs", "warmup", "seed")
"""Settings that a model card tells."""
SAMPLED = 1024
"""Numbers of a weight that stand for all of them in a checksum."""
FEATURES_CARD = """# {task}: a BiLSTM on frozen features of {base}

Its weights alone, which transformers cannot load; task.json says what they stand on. Ask it with
`python finetuning/predict.py`, or `finetuning.prediction.load`.
"""


@dataclass(frozen=True)
class Base:
    """A model to begin with: its weights, or from scratch fresh ones of the same sizes."""

    model: Model
    from_scratch: bool = False

    def shape_for(self, dropout: DropoutShares) -> Shape:
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
        """A checksum by which it is recognised, in JSON: another training of the same name has another."""
        seen = hashlib.sha256(f"{self.model.vocabulary.sha256} {asdict(self.model.shape)}".encode())
        for name, weight in sorted({} if self.from_scratch else self.model.encoder.items()):
            seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
        return {"from_scratch": self.from_scratch, "checksum": seen.hexdigest()[:16]}

    def write(self, tuner: Tuner, weights: Mapping[str, Tensor], use: Mapping[str, Any]) -> None:
        """Writes what a run has learned as a folder of transformers, once it is read back with the same logits, or a
        BiLSTM, which transformers does not have; `use` is what must be known to use it."""
        if tuner.settings.features.layers:
            self._write_features(tuner, weights, use)
            return
        task, shape, settings = tuner.task, tuner.engine.model.shape, tuner.settings
        made = TaskProvenance(
            task.name,
            summary_of(self.model),
            pretrained=not self.from_scratch,
            items={"train": len(task.train), **{name: len(items) for name, items in task.dev.items()}},
            scores=tuner.state.kept.scores,
            settings={name: getattr(settings, name) for name in TOLD},
        )
        card = task_card(shape, task.head, tuner.folder.parent / MODEL, settings.length, made)
        use, vocabulary = {"task": task.name, **use}, self.model.vocabulary

        def check(folder: Path) -> None:
            verify_fine_tuned(folder, shape, task.head, weights, logits_of)

        write_fine_tuned(
            tuner.folder / MODEL, shape, task.head, weights, vocabulary, card, use, settings.length, check=check
        )

    def _write_features(self, tuner: Tuner, weights: Mapping[str, Tensor], use: Mapping[str, Any]) -> None:
        found, task = self.model, tuner.task
        name = found.name if found.on_hub else str(found.folder.resolve())
        content = {
            "task": task.name,
            **use,
            "labels": task.head.labels,
            "features": tuner.settings.features.model_dump(mode="json"),
            "seed": tuner.settings.seed,
            "base": {"name": name, **self.identity},
        }
        card = FEATURES_CARD.format(task=task.name, base=summary_of(self.model).name)
        write_bare(tuner.folder / MODEL, weights, card, content)


def has_features(folder: Path) -> bool:
    """Whether a folder has a BiLSTM on frozen features."""
    return not (folder / CONFIG).exists() and (folder / TASK).exists() and "features" in read_task(folder)


def read_features(folder: Path) -> tuple[FeatureModel, TaskHead, Vocabulary]:
    """Reads a BiLSTM, and the encoder that it stands on from where that is."""
    task = read_task(folder)
    try:
        known, scratch, head = task["base"], task["base"]["from_scratch"], TaskHead("tags", tuple(task["labels"]))
        settings = FineTuning.model_validate({"seed": task["seed"], "features": task["features"]})
        trained = read_weights(folder / WEIGHTS)
    except (KeyError, TypeError, ValidationError, SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{folder}: cannot be read: {error}; fine-tune it anew") from error
    try:
        model = find_model(known["name"])
    except UserError as error:
        raise UserError(f"{folder}: stands on a model that is not there; put it back\n{error}") from error
    if Base(model, scratch).identity["checksum"] != known["checksum"]:
        raise UserError(f"{folder}: {known['name']} is not the model that it learned on; put that one back")
    made = build_model(head, model.shape, {} if scratch else model.encoder, settings)
    assert isinstance(made, FeatureModel)
    if made.state_dict().keys() != trained.keys():
        raise UserError(f"{folder / WEIGHTS}: not the weights that task.json tells of; fine-tune it anew")
    made.load_state_dict(trained)
    return made, head, model.vocabulary
