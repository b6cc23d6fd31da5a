"""Frozen activations of encoders as features: a BiLSTM on the states of some layers says what a task asks for.

The encoders are no part of what is trained or saved: they compute without dropout, and their weights stay as they are.
Two of them, one that sees what is before a piece and one that sees what is after it, stand side by side, layer by
layer, as in ELMo. What they give of an item is the same in every epoch, so that it may be kept.

n pieces, r rows that the BiLSTM reads, all pieces or the first ones of words; k layers that are chosen, W their width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from finetuning.model.bilstm import build_bilstm, read_both_ways, take_maximum
from finetuning.model.heads import Output, TaskBatch, apply_in_fp32, compute_loss, make_zero_loss
from finetuning.scale import Scale
from finetuning.settings import Features, LayerChoice
from pretraining.huggingface.weights import TaskHead
from pretraining.model.encoder import Encoder, Trainable
from pretraining.model.shape import Shape

LAST_FOUR = 4


class EncoderWeights(NamedTuple):
    """An encoder that is known but not made yet."""

    shape: Shape
    weights: Mapping[str, Tensor]
    """By our names; a pooler may be among them."""

    def fill_missing(self, seed: int) -> EncoderWeights:
        """The same with fresh weights where some are not known."""
        return self._replace(weights={**Encoder(self.shape).initialize(seed).state_dict(), **self.weights})


def count_layers(layers: LayerChoice, shape: Shape) -> int:
    """How many layers a choice of them takes, k."""
    every = {"mix": shape.layers + 1, "weighted-all": shape.layers}
    return every.get(layers, LAST_FOUR if layers.endswith("last-four") else 1)


class FrozenEncoders:
    """Encoders that do not learn, side by side."""

    def __init__(self, encoders: Sequence[EncoderWeights], layers: LayerChoice, words: bool):
        """`words`: only the first pieces of words that are tagged are looked at, otherwise all pieces."""
        self.layers, self.words = layers, words
        self.count = count_layers(layers, encoders[0].shape)
        self.width = sum(shape.hidden for shape, _ in encoders)
        self.encoders = []
        for shape, weights in encoders:
            encoder = Encoder(shape)
            encoder.load_state_dict(
                {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
            )
            self.encoders.append(encoder.eval().requires_grad_(False))

    @torch.no_grad()
    def compute_rows(self, batch: TaskBatch, dtype: torch.dtype) -> Tensor:
        """(r, k, W): the chosen states of every row, computed in these numbers."""
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
        """A checksum of all that decides what is computed of a batch in these numbers, but for rounding."""
        seen = hashlib.sha256(f"{self.layers} {self.words} {dtype}".encode())
        for encoder in self.encoders:
            seen.update(str(encoder.shape).encode())
            for name, weight in encoder.state_dict().items():
                seen.update(name.encode() + weight.to("cpu", dtype).contiguous().view(torch.uint8).numpy().tobytes())
        return seen.hexdigest()


class FeatureModel(Trainable):
    """A BiLSTM and a linear layer on frozen states of encoders: for every piece of spans, for every word of tags, and
    otherwise for a whole sequence by the highest of what the BiLSTM says of its pieces."""

    def __init__(
        self, encoders: Sequence[EncoderWeights], head: TaskHead, features: Features, scale: Scale | None = None
    ):
        """`scale` is that of the numbers it is to learn, as `TaskModel` has it."""
        super().__init__(encoders[0].shape)
        self.kind, self.task_scale = head.kind, scale or Scale()
        frozen = FrozenEncoders(encoders, features.layers, head.kind == "tags")
        self._frozen = (frozen,)  # in a tuple, so that it is no part of this module
        self.joins = features.layers == "concat-last-four"
        if frozen.count > 1 and not self.joins:
            self.mix = nn.Parameter(torch.zeros(frozen.count))
            self.scale = nn.Parameter(torch.ones(1))
        width = frozen.width * (frozen.count if self.joins else 1)
        self.lstm = build_bilstm(width, features.hidden, features.depth)
        self.head = nn.Linear(features.hidden, head.outputs)

    @property
    def frozen(self) -> FrozenEncoders:
        """The encoders."""
        return self._frozen[0]

    def forward(self, batch: TaskBatch) -> Output:
        learned = self._compute_learned(batch)
        loss = compute_loss(self.kind, learned, batch, self.task_scale)
        return Output(loss, self.task_scale.unscale(learned), make_zero_loss(loss))

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the logits of the head, in fp32."""
        return self.task_scale.unscale(self._compute_learned(batch))

    def _compute_learned(self, batch: TaskBatch) -> Tensor:
        lengths = batch.words_of_items if self.kind == "tags" else batch.lengths
        read = read_both_ways(self.lstm, self.compute_features(batch), lengths)
        if self.kind not in ("tags", "spans"):
            read = take_maximum(read, lengths)
        logits = apply_in_fp32(self.head, read)
        return logits.view(-1, batch.choices) if self.kind == "choice" else logits

    def compute_features(self, batch: TaskBatch) -> Tensor:
        """(r, width): what the BiLSTM reads, of states that were kept or are computed now: the mean of the layers by
        learned shares, times a learned factor, γ·Σ softmax(s)_j·h_j, or the layers side by side."""
        dtype = self.head.weight.dtype
        rows = (
            self.frozen.compute_rows(batch, dtype)
            if batch.kept is None
            else batch.kept().to(batch.pieces.device, dtype)
        )
        if rows.shape[1] == 1 or self.joins:
            return rows.flatten(1)
        return self.scale * torch.einsum("l,nlh->nh", torch.softmax(self.mix.float(), 0).to(dtype), rows)
