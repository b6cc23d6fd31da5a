"""The folder of a BiLSTM that learned on frozen features: its weights, and in task.json what it stands on.

The encoder is not in it: it stays in the folder, or on the hub, where it was, and is recognised by its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.features import FeatureModel
from finetuning.model.models import find_model, summary_of
from finetuning.places import MODEL
from finetuning.running.base import Base
from finetuning.running.loop import Run
from finetuning.running.starting import build_model
from finetuning.settings import FineTuning
from pretraining.huggingface.folders import CONFIG, TASK, WEIGHTS, read_task, write_bare
from pretraining.huggingface.weights import TaskHead
from pretraining.huggingface.weights_file import read_weights

CARD = """# {task}: a BiLSTM on frozen features of {base}

Its weights alone, which transformers cannot load; task.json says what they stand on. Ask it with
`python finetuning/predict.py`, or `finetuning.prediction.load`.
"""


def write_features(run: Run, base: Base, weights: Mapping[str, Tensor], use: Mapping[str, Any]) -> None:
    """Writes what a run has learned, whole or not at all; `use` is what must be known to use it."""
    found, settings = base.model, run.settings
    name = found.name if found.on_hub else str(found.folder.resolve())
    task = {
        "task": run.task.name,
        **use,
        "labels": run.task.head.labels,
        "features": settings.features.model_dump(mode="json"),
        "seed": settings.seed,
        "base": {"name": name, **base.identity},
    }
    write_bare(run.folder / MODEL, weights, CARD.format(task=run.task.name, base=summary_of(base.model).name), task)


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
