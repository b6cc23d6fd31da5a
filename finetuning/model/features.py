"""Frozen activations of an encoder as features: a BiLSTM on the states of some layers tags the words.

The encoder is no part of what is trained or saved: it computes without dropout, and its weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from finetuning.model.heads import Output, TaskBatch, loss_of
from finetuning.scale import Scale
from finetuning.settings import Features
from pretraining.huggingface.weights import TaskHead
from pretraining.model.encoder import Encoder, Trainable
from pretraining.model.shape import Shape

LAST_FOUR = 4


class FeatureModel(Trainable):
    """A BiLSTM and a linear layer on frozen states of an encoder, for a tag a word."""

    def __init__(self, shape: Shape, head: TaskHead, features: Features, weights: Mapping[str, Tensor]):
        """`weights` are those of the encoder."""
        super().__init__(shape)
        assert head.kind == "tags", "features are for words"
        self.layers_wanted = features.layers
        encoder = Encoder(shape)
        encoder.load_state_dict({name: weight for name, weight in weights.items() if not name.startswith("pooler.")})
        self._frozen = (encoder.eval().requires_grad_(False),)  # in a tuple, so that it is no part of this module
        if features.layers.startswith("weighted"):
            count = LAST_FOUR if features.layers == "weighted-last-four" else shape.layers
            self.mix = nn.Parameter(torch.zeros(count))
            self.scale = nn.Parameter(torch.ones(1))
        width = shape.hidden * (LAST_FOUR if features.layers == "concat-last-four" else 1)
        half = features.hidden // 2
        self.lstm = nn.LSTM(width, half, features.depth, batch_first=True, bidirectional=True)
        self.head = nn.Linear(features.hidden, head.outputs)

    def forward(self, batch: TaskBatch) -> Output:
        logits = self.logits(batch)
        return Output(loss_of("tags", logits, batch, Scale()), logits)

    def logits(self, batch: TaskBatch) -> Tensor:
        """(m, tags): what the head says of every word, in fp32."""
        words = torch.split(self._features(batch)[batch.words], list(batch.words_of_items))
        kept = [item for item in words if len(item)]
        if not kept:
            return self.head.weight.new_zeros((0, self.head.out_features), dtype=torch.float32)
        lengths = torch.tensor([len(item) for item in kept])
        packed = pack_padded_sequence(
            pad_sequence(kept, batch_first=True), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        rows = torch.cat([states[row, :length] for row, length in enumerate(lengths.tolist())])
        return F.linear(rows.float(), self.head.weight.float(), self.head.bias.float())

    def _features(self, batch: TaskBatch) -> Tensor:
        """(n, width): the chosen states of every piece."""
        encoder = self._frozen[0].to(batch.pieces.device, self.head.weight.dtype)
        with torch.no_grad():
            states = list(encoder.states(batch))
        layers = self.layers_wanted
        if layers == "embeddings":
            return states[0]
        if layers in ("last", "second-to-last"):
            return states[-1 if layers == "last" else -2]
        if layers == "concat-last-four":
            return torch.cat(states[-LAST_FOUR:], dim=1)
        if layers == "sum-all":
            return torch.stack(states[1:]).sum(0)
        shares = torch.softmax(self.mix.float(), 0).to(states[0].dtype)
        return self.scale * torch.einsum("l,lnh->nh", shares, torch.stack(states[-len(shares) :]))
