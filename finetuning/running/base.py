"""The initial model of all runs of a command."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from data_prep.vocabulary.vocabulary import Vocabulary
from finetuning.model.features import EncoderWeights
from finetuning.settings import DropoutShares
from finetuning.tasks.task import Task
from pretraining.checkpoint.models import StoredModel
from pretraining.huggingface.weights import list_weights
from pretraining.model.shape import Shape

SAMPLED = 1024
"""Numbers of each weight that enter a checksum."""


@dataclass(frozen=True)
class Base:
    """An initial model: its weights, or from scratch fresh ones of the same sizes."""

    model: StoredModel
    from_scratch: bool = False
    backward: StoredModel | None = None
    """A second, right-to-left model whose frozen features are concatenated with those of the first."""

    def build_shape(self, dropout: DropoutShares) -> Shape:
        """Returns its shape with the dropout of the settings."""
        given = {"dropout": dropout.hidden, "attention_dropout": dropout.attention}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self.model.shape, **values)

    @property
    def beside(self) -> EncoderWeights | None:
        """The second encoder, if there is one."""
        if self.backward is None:
            return None
        return EncoderWeights(self.backward.shape, {} if self.from_scratch else self.backward.encoder)

    def select_weights(self, task: Task, language: bool = False) -> Mapping[str, Tensor]:
        """Selects the initial weights of a run, with those of the `language` head if it is trained on."""
        if self.from_scratch:
            return {}
        wanted = {weight.ours for weight in list_weights(self.model.shape, task.head)}
        known = {name: weight for name, weight in self.model.encoder.items() if name in wanted}
        return {**known, **self.model.language_head} if language else known

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identifies the initial weights, in JSON: retraining under the same name changes it."""
        own = {"from_scratch": self.from_scratch, "checksum": self._checksum(self.model)}
        return own if self.backward is None else {**own, "backward": self._checksum(self.backward)}

    def _checksum(self, model: StoredModel) -> str:
        return compute_checksum(model.vocabulary, model.shape, {} if self.from_scratch else model.encoder)


def compute_checksum(vocabulary: Vocabulary, shape: Shape, weights: Mapping[str, Tensor]) -> str:
    """Computes a checksum of a model from a sample of each weight."""
    seen = hashlib.sha256(f"{vocabulary.sha256} {asdict(shape)}".encode())
    for name, weight in sorted(weights.items()):
        seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
    return seen.hexdigest()[:16]
