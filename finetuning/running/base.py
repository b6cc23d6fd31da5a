"""What a run begins with: its task, settings and folder, and the initial model of all runs of a command."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.model.heads import TaskModel
from finetuning.results import RESULTS, Begun
from finetuning.scale import Scale
from finetuning.settings import FineTuning
from finetuning.tasks.task import Task
from pretraining.architectures.weights import TaskHead
from pretraining.checkpoint.models import StoredModel
from pretraining.model.shape import HEAD, Shape

SAMPLED = 1024
"""Numbers of each weight that enter a checksum."""
UNKNOWN = Begun()


@dataclass(frozen=True)
class Run:
    """A run of a task, with its settings, its seed and its folder."""

    task: Task
    settings: FineTuning
    folder: Path
    begun: Begun = UNKNOWN
    """The settings, model and data that determine its outcome."""
    trains: bool = True
    """Whether it trains a model, rather than scoring one as it is."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_done(self) -> bool:
        return (self.folder / RESULTS).exists()


@dataclass(frozen=True)
class Base:
    """An initial model: its weights, or from scratch fresh ones of the same sizes."""

    model: StoredModel
    from_scratch: bool = False
    backward: StoredModel | None = None
    """A second, right-to-left model whose frozen features are concatenated with those of the first."""

    def build_model(
        self, head: TaskHead, settings: FineTuning, scale: Scale | None = None, fresh: bool = True
    ) -> TaskModel | FeatureModel:
        """Builds the model of a task; a `fresh` one takes the initial weights and draws missing ones by the seed."""
        given = {"dropout": settings.dropout.hidden, "attention_dropout": settings.dropout.attention}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        shape = replace(self.model.shape, **values)
        if settings.features.layers:
            return self._build_on_features(head, shape, settings, scale)
        recompute = settings.compute.checkpoint_activations
        model = TaskModel(shape, head, recompute, scale, settings.bilstm, settings.language_loss > 0)
        model.initialize(settings.seed)
        if fresh and not self.from_scratch:
            known, own = dict(self.model.encoder), model.state_dict()
            if settings.language_loss:
                known |= self.model.language_head
            model.load_state_dict({**own, **{name: weight for name, weight in known.items() if name in own}})
        return model

    def _build_on_features(
        self, head: TaskHead, shape: Shape, settings: FineTuning, scale: Scale | None
    ) -> FeatureModel:
        """Builds a BiLSTM on frozen encoders; the weights of an encoder that are missing are drawn by the seed."""
        encoders = [EncoderWeights(shape, self._read_encoder(self.model))]
        if self.backward is not None:
            encoders.append(EncoderWeights(self.backward.shape, self._read_encoder(self.backward)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            known = [encoder.fill_missing(settings.seed + number) for number, encoder in enumerate(encoders)]
            model = FeatureModel(known, head, settings.features, scale)
            nn.init.normal_(model.head.weight, std=HEAD.initial_range)
        return model

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identifies the initial weights, in JSON: retraining under the same name changes it."""
        own = {"from_scratch": self.from_scratch, "checksum": self._checksum(self.model)}
        own |= {"sees": self.model.sees} if self.model.sees else {}
        return own if self.backward is None else {**own, "backward": self._checksum(self.backward)}

    def _checksum(self, model: StoredModel) -> str:
        return compute_checksum(model.vocabulary, model.shape, self._read_encoder(model))

    def _read_encoder(self, model: StoredModel) -> Mapping[str, Tensor]:
        return {} if self.from_scratch else model.encoder


def compute_checksum(vocabulary: Vocabulary, shape: Shape, weights: Mapping[str, Tensor]) -> str:
    """Computes a checksum of a model from a sample of each weight."""
    values = {name: value for name, value in shape.values().items() if name != "initializer_range"}
    seen = hashlib.sha256(f"{vocabulary.sha256} {values}".encode())
    for name, weight in sorted(weights.items()):
        seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
    return seen.hexdigest()[:16]
