"""Encoders that learn the vectors of texts: by the texts of a batch that belong together, against all its other texts.

The loss of a step is a function of all vectors of its global batch. Its gradient with regard to these is computed
first; each micro-batch then goes back through the encoder from its own part of it. So a batch may be larger than memory
(Gao et al. 2021, GradCache), and neither micro-batches nor ranks change anything but rounding.

n items, c texts of an item: a question, its passage and perhaps passages that do not belong to it; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from finetuning.model.heads import Output, TaskBatch
from finetuning.settings import EmbeddingSettings
from pretraining.architectures.declaration import find_architecture
from pretraining.engine.engine import Engine
from pretraining.engine.step import GivenUpError, Seeds, seed_step
from pretraining.huggingface.pooling import Pooling
from pretraining.model.batch import StepBatches
from pretraining.model.encoder import Encoder
from pretraining.model.shape import Shape
from pretraining.processes.group import gather_rows, place

ROWS = 1024
"""Questions that are compared with all passages at a time."""


class VectorModel(Encoder):
    """An encoder whose outputs are the vectors of texts."""

    def __init__(self, shape: Shape, pooling: Pooling, recompute: bool = False):
        super().__init__(shape, find_architecture(shape.architecture), recompute)
        self.pooling = pooling

    def forward(self, batch: TaskBatch) -> Output:
        """Computes the vectors alone: the loss is a function of those of all micro-batches and ranks."""
        vectors = self.logits(batch)
        nothing = torch.zeros((), device=vectors.device)
        return Output(nothing, vectors, nothing)

    def logits(self, batch: TaskBatch) -> Tensor:
        """Computes the vectors of texts (s, H), in fp32."""
        return self.pooling.compute(self.encode, batch)


class Contrast:
    """The loss of one step, by the vectors of its global batch."""

    def __init__(
        self,
        engine: Engine,
        settings: EmbeddingSettings,
        batches: StepBatches[TaskBatch],
        seeds: Seeds,
        mark: Callable[[], None] = lambda: None,
        gives_up: Callable[[], bool] = lambda: False,
    ):
        """With several micro-batches, computes their vectors in a first pass with the same dropout masks as in the
        second. `mark` and `gives_up` are those of `train_step`."""
        self.settings, self.mark = settings, mark
        self.found: Iterator[tuple[Tensor, Tensor]] | None = None
        if len(batches.micro) > 1:
            seed_step(engine, seeds)
            vectors = []
            with torch.no_grad():
                for number, batch in enumerate(batches.micro):
                    mark()
                    if number and gives_up():
                        raise GivenUpError
                    vectors.append(engine.forward(batch.to(engine.device)).logits)
            self.found = iter(self._find_gradients(batches, vectors))

    def loss_of(self, output: Output, batches: StepBatches[TaskBatch]) -> Tensor:
        """Returns a micro-batch's part of the loss, whose gradient goes into the encoder."""
        if self.found is None:
            self.found = iter(self._find_gradients(batches, [output.logits.detach()]))
        loss, gradient = next(self.found)
        part = (output.logits * gradient).sum()
        return part - part.detach() + loss

    def _find_gradients(self, batches: StepBatches[TaskBatch], vectors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Computes the part of the loss of each micro-batch of this rank, and its gradient; both are 0
        for a micro-batch without labels."""
        labels = [batch.labels.double() for batch in batches.micro if batch.labels is not None]
        choices, pairs = batches.micro[0].choices, zip(vectors, batches.micro, strict=True)
        own = [each[:0] if batch.labels is None else each for each, batch in pairs]
        mine = torch.cat(own).view(-1, choices, vectors[0].shape[1])
        answers = torch.cat(labels).view(len(mine), -1) if labels else torch.empty(0, dtype=torch.float64)
        self.mark()
        counts, every = gather_rows(mine)
        _, known = gather_rows(answers.to(mine.device))
        loss, gradient = compute_contrast(every, known, self.settings)
        begin = sum(counts[: place()[0]])
        parts = torch.split(gradient[begin : begin + len(mine)].flatten(0, 1), [*map(len, own)])
        return [
            (loss * (len(part) / choices / len(every)), part if len(part) else torch.zeros_like(each))
            for each, part in zip(vectors, parts, strict=True)
        ]


def compute_contrast(vectors: Tensor, labels: Tensor, settings: EmbeddingSettings) -> tuple[Tensor, Tensor]:
    """Computes the loss of vectors (n, c, H) and its gradient, by blocks of questions. `labels`, in fp64: numbers of
    texts (n, c), equal for equal texts; or scores (n, 1). Each of the Matryoshka dimensions adds a loss of its own."""
    has_scores = labels.shape[1] == 1
    with torch.enable_grad():
        leaf = vectors.detach().clone().requires_grad_()
        total = torch.zeros((), device=leaf.device)
        blocks = range(0, len(vectors), len(vectors) if has_scores else ROWS)
        for width, begin in product({leaf.shape[2], *settings.widths}, blocks):
            truncated = F.normalize(leaf[:, :, :width], dim=2)
            if has_scores:
                part = compute_cosent(truncated, labels[:, 0], settings.temperature)
            else:
                part = compare_passages(truncated, labels, slice(begin, begin + ROWS), settings)
            torch.autograd.backward(part)
            total += part.detach()
    assert leaf.grad is not None
    return total, leaf.grad


def compare_passages(vectors: Tensor, texts: Tensor, rows: slice, settings: EmbeddingSettings) -> Tensor:
    """Computes the share of these rows in the mean cross-entropy of classifying each question's passage among all
    passages; if symmetric, averaged with that of classifying each passage's question."""
    right, losses = torch.arange(len(vectors), device=vectors.device)[rows], []
    for columns in ([*range(vectors.shape[1])], [1, 0])[: 1 + settings.symmetric]:
        asked, *others = vectors[:, columns].unbind(1)
        logits = asked[rows] @ torch.cat(others).T / settings.temperature
        logits = logits.masked_fill(find_same(texts[:, columns], rows, right), -torch.inf)
        losses.append(F.cross_entropy(logits, right, reduction="sum"))
    return torch.stack(losses).mean() / len(vectors)


def find_same(texts: Tensor, rows: slice, places: Tensor) -> Tensor:
    """Marks the passages that are no negatives of the questions at these places, (rows, n·(c - 1)): they equal it or
    its passage, or belong to an equal question."""
    questions, passages = texts[:, 0], texts[:, 1:].T.flatten()
    own, right = questions[rows, None], texts[rows, 1, None]
    same = (passages == own) | (passages == right)
    same[:, : len(texts)] |= questions == own
    same[torch.arange(len(places), device=texts.device), places] = False
    return same


def compute_cosent(vectors: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Computes CoSENT's loss: of any two pairs of texts, that with the higher score should have the higher cosine."""
    cosines = (vectors[:, 0] * vectors[:, 1]).sum(1) / temperature
    over = (cosines[:, None] - cosines).masked_fill(scores[:, None] >= scores, -torch.inf)
    return torch.logsumexp(torch.cat([cosines.new_zeros(1), over.flatten()]), 0)
