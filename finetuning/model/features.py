"""Frozen activations as features: a BiLSTM and a task head on the states of some layers of an encoder.

Encoders are neither trained nor saved, and compute without dropout. Two of them, a left-to-right and a right-to-left
one, may be concatenated layer by layer, as in ELMo. Their activations are the same in every epoch, so they can be
cached.

n pieces, r rows that the BiLSTM reads (all pieces, or the first ones of words), k chosen layers, W their width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from finetuning.model import heads
from finetuning.model.heads import Output, TaskBatch
from finetuning.scale import ScoreScale
from finetuning.settings import Features, LayerChoice
from pretraining.architectures.declaration import build_encoder
from pretraining.architectures.weights import TaskHead
from pretraining.model.encoder import Trainable
from pretraining.model.shape import Shape

LAST_FOUR = 4


class EncoderWeights(NamedTuple):
    """The shape and weights of an encoder that is not built yet."""

    shape: Shape
    weights: Mapping[str, Tensor]
    """By our names, perhaps with a pooler."""

    def fill_missing(self, seed: int) -> EncoderWeights:
        """Returns a copy with fresh weights in place of missing ones."""
        return self._replace(weights={**build_encoder(self.shape).initialize(seed).state_dict(), **self.weights})


class FrozenEncoders:
    """Encoders that do not learn, concatenated."""

    def __init__(self, encoders: Sequence[EncoderWeights], layers: LayerChoice, words: bool):
        """`words`: use the first pieces of tagged words alone, otherwise all pieces."""
        self.layers, self.words = layers, words
        every = {"mix": encoders[0].shape.layers + 1, "weighted-all": encoders[0].shape.layers}
        self.count = every.get(layers, LAST_FOUR if layers.endswith("last-four") else 1)
        """The number of layers that the choice takes, k."""
        self.width = sum(shape.hidden for shape, _ in encoders)
        self.encoders = []
        for shape, weights in encoders:
            encoder = build_encoder(shape)
            used = {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
            encoder.load_state_dict(used)
            self.encoders.append(encoder.eval().requires_grad_(False))

    @torch.no_grad()
    def compute_rows(self, batch: TaskBatch, dtype: torch.dtype) -> Tensor:
        """Computes the chosen states (r, k, W) of every row in this dtype."""
        device = batch.pieces.device
        of_encoders = [encoder.to(device, dtype).encode_layers(batch) for encoder in self.encoders]
        states = [torch.cat(layer, 1) for layer in zip(*of_encoders, strict=True)]
        chosen = [state[batch.words] if self.words else state for state in self._choose_states(states)]
        return torch.stack(chosen, 1)

    def _choose_states(self, states: list[Tensor]) -> list[Tensor]:
        if self.layers == "sum-all":
            return [torch.stack(states[1:]).sum(0)]
        if self.layers in ("embeddings", "second-to-last"):
            return [states[0 if self.layers == "embeddings" else -2]]
        return states[-self.count :]

    def compute_fingerprint(self, dtype: torch.dtype) -> str:
        """Computes a checksum of all that determines the activations in this dtype, but for rounding."""
        seen = hashlib.sha256(f"{self.layers} {self.words} {dtype}".encode())
        for encoder in self.encoders:
            seen.update(str(encoder.shape).encode())
            for name, weight in encoder.state_dict().items():
                seen.update(name.encode() + weight.to("cpu", dtype).contiguous().view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()


class FeatureModel(Trainable):
    """A BiLSTM and a linear layer on frozen states: for every piece (spans), every word (tags), or max-pooled over the
    sequence (other tasks)."""

    def __init__(
        self, encoders: Sequence[EncoderWeights], head: TaskHead, features: Features, scale: ScoreScale | None = None
    ):
        """`scale`: mean and spread of the targets, as for `TaskModel`."""
        super().__init__(encoders[0].shape)
        self.kind, self.task_scale = head.kind, scale or ScoreScale()
        frozen = FrozenEncoders(encoders, features.layers, head.kind == "tags")
        self._frozen = (frozen,)  # in a tuple, so that it is no part of this module
        self.joins = features.layers == "concat-last-four"
        if frozen.count > 1 and not self.joins:
            self.mix = nn.Parameter(torch.zeros(frozen.count))
            self.scale = nn.Parameter(torch.ones(1))
        width = frozen.width * (frozen.count if self.joins else 1)
        self.lstm = heads.build_bilstm(width, features.hidden, features.depth)
        self.head = nn.Linear(features.hidden, head.outputs)

    @property
    def frozen(self) -> FrozenEncoders:
        """The encoders."""
        return self._frozen[0]

    def forward(self, batch: TaskBatch) -> Output:
        learned = self._compute_learned(batch)
        loss = heads.compute_loss(self.kind, learned, batch, self.task_scale)
        return Output(loss, self.task_scale.unscale(learned), torch.zeros((), device=loss.device))

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        return self.task_scale.unscale(self._compute_learned(batch))

    def _compute_learned(self, batch: TaskBatch) -> Tensor:
        lengths = batch.words_of_items if self.kind == "tags" else batch.lengths
        read = heads.read_both_ways(self.lstm, self.compute_features(batch), lengths)
        if self.kind not in ("tags", "spans"):
            read = heads.pool("max", read, lengths)
        logits = heads.apply_in_fp32(self.head, read)
        return logits.view(-1, batch.choices) if self.kind == "choice" else logits

    def compute_features(self, batch: TaskBatch) -> Tensor:
        """Computes the inputs (r, width) of the BiLSTM from cached or fresh states: γ·Σ softmax(s)_j·h_j over the
        layers, or the layers concatenated."""
        dtype = self.head.weight.dtype
        if batch.kept is None:
            rows = self.frozen.compute_rows(batch, dtype)
        else:
            rows = batch.kept().to(batch.pieces.device, dtype)
        if rows.shape[1] == 1 or self.joins:
            return rows.flatten(1)
        return self.scale * torch.einsum("l,nlh->nh", torch.softmax(self.mix.float(), 0).to(dtype), rows)
