"""The model that all runs of a command begin with."""

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
"""Numbers of a weight that stand for all of them in a checksum."""


@dataclass(frozen=True)
class Base:
    """A model to begin with: its weights, or from scratch fresh ones of the same sizes."""

    model: StoredModel
    from_scratch: bool = False
    backward: StoredModel | None = None
    """One that sees what is after a piece, whose frozen features stand beside those of the first."""

    def build_shape(self, dropout: DropoutShares) -> Shape:
        """Its sizes, with what the settings say of dropout."""
        given = {"dropout": dropout.hidden, "attention_dropout": dropout.attention}
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self.model.shape, **values)

    @property
    def beside(self) -> EncoderWeights | None:
        """The encoder whose features stand beside those of the first, if there is one."""
        if self.backward is None:
            return None
        return EncoderWeights(self.backward.shape, {} if self.from_scratch else self.backward.encoder)

    def select_weights(self, task: Task, language: bool = False) -> Mapping[str, Tensor]:
        """The weights that a run of a task begins with; those of the `language` head too where it goes on to learn."""
        if self.from_scratch:
            return {}
        wanted = {weight.ours for weight in list_weights(self.model.shape, task.head)}
        known = {name: weight for name, weight in self.model.encoder.items() if name in wanted}
        return {**known, **self.model.language_head} if language else known

    @cached_property
    def identity(self) -> dict[str, Any]:
        """A checksum by which it is recognised, in JSON: another training of the same name has another."""
        own = {"from_scratch": self.from_scratch, "checksum": self._checksum(self.model)}
        return own if self.backward is None else {**own, "backward": self._checksum(self.backward)}

    def _checksum(self, model: StoredModel) -> str:
        return compute_checksum(model.vocabulary, model.shape, {} if self.from_scratch else model.encoder)


def compute_checksum(vocabulary: Vocabulary, shape: Shape, weights: Mapping[str, Tensor]) -> str:
    """A checksum of a model, of whose weights some numbers stand for all."""
    seen = hashlib.sha256(f"{vocabulary.sha256} {asdict(shape)}".encode())
    for name, weight in sorted(weights.items()):
        seen.update(name.encode() + weight.flatten()[:SAMPLED].float().numpy().tobytes())
    return seen.hexdigest()[:16]
