"""The modules of ELECTRA that BERT does not have: heads of its own, and a generator of pieces that replace others.

n pieces, m predicted ones, H hidden, G hidden of the generator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.common.hashing import hash_key
from pretraining.model.batch import Batch, PretrainingBatch
from pretraining.model.bert import BertPieceHead, Pooler
from pretraining.model.dropout import Dropout
from pretraining.model.encoder import ArchitectureOfModel, Embeddings, Encoder
from pretraining.model.fused import widen
from pretraining.model.losses import MOST_LOGITS
from pretraining.model.modules import Linear
from pretraining.model.shape import Shape


class GeluPooler(Pooler):
    """Transforms the states of the pieces that stand for their sequences, with another activation than BERT's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight, self.bias))


class DetectionHead(nn.Module):
    """Computes the logit of each piece that it was replaced, (n,)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(F.gelu(self.dense(hidden)))
        return logits.squeeze(1)


@dataclass(frozen=True)
class SamplingBatch(PretrainingBatch):
    """A batch with the numbers by which pieces are drawn."""

    chances: Tensor  # (m,) fp32, from 0 to below 1: how much probability the pieces before the drawn one have


class GeneratorHead(BertPieceHead):
    """Predicts pieces from the states of a generator, (m, G), by the table of the model, and draws some."""

    def __init__(self, shape: Shape, own_hidden: int, at_once: int | None):
        super().__init__(shape, at_once)
        self.transform = Linear(own_hidden, shape.hidden)

    @torch.no_grad()
    def sample(self, hidden: Tensor, decoder: Tensor, chances: Tensor) -> Tensor:
        """Draws a piece for each row from its distribution, (m,) int64, with the logits of some rows at a time."""
        rows = max(1, MOST_LOGITS // len(decoder))
        parts = zip(hidden.split(rows), chances.split(rows), strict=True)
        return torch.cat([self._sample(part, decoder, numbers) for part, numbers in parts])

    def _sample(self, hidden: Tensor, decoder: Tensor, chances: Tensor) -> Tensor:
        sums = widen(self.logits(hidden, decoder)).softmax(1).cumsum(1)
        wanted = chances[:, None] * sums[:, -1:]  # of what the sum is in spite of rounding
        return torch.searchsorted(sums, wanted, right=True).squeeze(1).clamp_(max=self.vocabulary - 1)


class ProjectedEmbeddings(Embeddings):
    """The embeddings of another model, projected to the width of a generator."""

    def __init__(self, hidden: int, own_hidden: int):
        super().__init__()
        self.projection = Linear(hidden, own_hidden)
        self.shared: tuple[Embeddings, ...] = ()
        """the embeddings of the model; in a tuple, since they are no part of this module"""

    def forward(self, batch: Batch, dropout: Dropout) -> Tensor:
        (embeddings,) = self.shared
        projected: Tensor = self.projection(embeddings(batch, dropout)) + self.projection.bias
        return projected


class Generator(Encoder):
    """Layers on the embeddings of a model, and a head that predicts pieces by its table."""

    def __init__(self, shape: Shape, own: Shape, architecture: ArchitectureOfModel, at_once: int | None):
        """`shape` is that of the model, `own` that of the layers here."""
        super().__init__(own, architecture)
        self.embeddings = ProjectedEmbeddings(shape.hidden, own.hidden)
        self.predictor = GeneratorHead(shape, own.hidden, at_once)

    def forward(self, model: Encoder, batch: PretrainingBatch) -> Tensor:
        """Computes the states of the masked pieces, (m, G). Its dropout follows the seed of the model."""
        assert isinstance(self.embeddings, ProjectedEmbeddings)
        self.embeddings.shared = (model.embeddings,)
        self.recompute, self.dropout_seed = model.recompute, int(hash_key(model.dropout_seed, 1)[0])
        return self.encode(batch, batch.chosen)
