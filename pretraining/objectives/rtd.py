"""Replaced pieces, as in ELECTRA: a small generator predicts the masked pieces, and the model says of every piece of
the text with these predictions whether it was replaced.

The generator reads the embeddings of the model, and its decoder is the table of pieces. Its pieces are drawn from its
distribution by numbers that follow from the seed, the phase and the example's place in the order of all epochs. No
gradient passes through the draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from data_prep.common.sections import Positive
from pretraining.architectures.declaration import find_architecture
from pretraining.architectures.weights import Weight, count_products, declare_linear, declare_norm
from pretraining.model.shape import BIAS, DETECTION_HEAD, HEAD, Shape
from pretraining.objectives.costs import Pass
from pretraining.objectives.declaration import Figure
from pretraining.objectives.mlm import MaskedPieces, MaskedSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.encoder import PretrainingModel
    from pretraining.model.rows import Draw, Rows

GENERATOR = "generator"
"""The name of the generator, in models and in stored weights."""
DRAWN = 0x647261776E
"""Begins the keys of the numbers that pieces are drawn by, so that they differ from those of masks."""


class ReplacedLosses(NamedTuple):
    """The sums over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces by the generator"""
    masked_correct: Tensor
    detection: Tensor
    """cross-entropy of whether each piece was replaced"""
    replaced: Tensor
    """pieces that the generator replaced by another one"""
    detected: Tensor
    """these of which the model says so"""
    false_alarms: Tensor
    """other pieces of which the model says so"""
    read: Tensor
    """all pieces"""


class ReplacedSettings(MaskedSettings):
    """The settings of replaced pieces: those of masks, and the generator."""

    generator_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """rtd: attention heads of the generator, and with them its widths, as a share of the model's (ELECTRA: 1/4 to
    1/2)."""
    generator_layers: Positive | None = None
    """rtd: layers of the generator (default: as many as the model has)."""
    detection_weight: Annotated[float, Field(gt=0)] = 50.0
    """rtd: weight of the loss of all pieces beside that of the generator."""


class ReplacedPieces(MaskedPieces):
    """Says of every piece whether the generator replaced it."""

    settings_type = ReplacedSettings
    settings: ReplacedSettings
    model_settings = ("generator_share", "generator_layers", "detection_weight")
    logits_at_once = 1024
    learns = "finds replaced pieces"
    sum_of_pieces, can_be_shared = None, False
    loads_as = "AutoModelForPreTraining"
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("masked_loss", "generator's loss", "nats", "cross-entropy of a masked piece", "masked-word loss"),
        Figure("masked_accuracy", "generator's accuracy", "%", "masked pieces that are the generator's first choice"),
        Figure(
            "detection_loss",
            "detection loss",
            "nats",
            "cross-entropy of whether a piece was replaced",
            "loss of replaced pieces",
        ),
        Figure("detected", "detected", "%", "replaced pieces that the model finds"),
        Figure("false_alarms", "false alarms", "%", "other pieces that the model takes for replaced"),
    )

    def used_settings(self, shape: Shape) -> list[str]:
        return [name for name in super().used_settings(shape) if name != "next_sentences"]

    @property
    def uses_pairs(self) -> bool:
        return False

    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:
        """Makes a batch with a number for each masked piece; without a draw, it follows from the example alone."""
        import numpy as np
        import torch

        from data_prep.common.hashing import hash_key
        from pretraining.model.batch import pack
        from pretraining.model.electra import SamplingBatch

        masked = self.mask(rows, draw)
        keys = hash_key(*rows.where.T) if draw is None else draw.keys
        which = np.searchsorted(rows.starts, masked.chosen, side="right") - 1
        numbers = hash_key(DRAWN, keys[which], masked.chosen - rows.starts[which])
        chances = ((numbers >> np.uint64(40)) * 2.0**-24).astype(np.float32)
        return SamplingBatch(**vars(pack(rows, *masked)), chances=torch.from_numpy(chances))

    # The generator.

    def find_generator(self, shape: Shape) -> Shape:
        """Computes the shape of the generator's layers, which has whole heads of the model's size."""
        heads = max(1, round(self.settings.generator_share * shape.heads))
        return replace(
            shape.encoder,
            layers=self.settings.generator_layers or shape.layers,
            hidden=shape.hidden // shape.heads * heads,
            heads=heads,
            intermediate=max(1, shape.intermediate * heads // shape.heads),
        )

    def heads(self, shape: Shape) -> dict[str, str]:  # noqa: ARG002
        return {GENERATOR: "generator", DETECTION_HEAD: "head of replaced pieces"}

    def exported_heads(self, shape: Shape) -> list[str]:  # noqa: ARG002
        return [DETECTION_HEAD]

    def own_weights(self, shape: Shape) -> list[Weight]:
        own, kind = self.find_generator(shape), find_architecture(shape.architecture)
        weights = [
            *declare_linear("embeddings.projection", [], own.hidden, shape.hidden),
            *kind.weights(own)[len(kind.embeddings(own)) :],
            Weight("predictor.bias", (), (shape.vocabulary,), BIAS, "vocabulary", "pieces"),
            *declare_linear("predictor.transform", [], shape.hidden, own.hidden, HEAD),
            *declare_norm("predictor.norm", "", shape.hidden),
        ]
        return [replace(weight, ours=f"{GENERATOR}.{weight.ours}", theirs=()) for weight in weights]

    def build(self, shape: Shape) -> dict[str, nn.Module]:
        from pretraining.model.electra import Generator

        own, kind = self.find_generator(shape), find_architecture(shape.architecture)
        return {GENERATOR: Generator(shape, own, kind, self.logits_at_once), **super().build(shape)}

    def flops(self, shape: Shape, sequences: int, predictions: float) -> float:  # noqa: ARG002
        return predictions * 2 * shape.hidden * (self.find_generator(shape).hidden + shape.vocabulary)

    def passes(self, shape: Shape, sequences: int, pieces: float, predictions: float) -> list[Pass]:  # noqa: ARG002
        """Lists the pass through the generator and that through the model, of which the head reads all pieces."""
        own, kind = self.find_generator(shape), find_architecture(shape.architecture)
        head = count_products(kind.heads(shape).get(DETECTION_HEAD, []))
        embeddings = kind.layer_memory(shape).embeddings + own.hidden
        return [
            Pass(own, predictions, flops=2 * pieces * shape.hidden * own.hidden, kept=pieces * embeddings),
            Pass(shape, pieces, flops=pieces * head, kept=2 * pieces * shape.hidden),
        ]

    # Its losses and figures.

    def forward(self, model: PretrainingModel, batch: PretrainingBatch) -> ReplacedLosses:
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        from pretraining.model.electra import SamplingBatch
        from pretraining.model.fused import widen

        assert isinstance(batch, SamplingBatch)
        generator, table = model.head(GENERATOR), model.embeddings.word.weight
        seen = generator(model, batch)
        masked, masked_correct = generator.predictor(seen, table, batch.labels)
        drawn = generator.predictor.sample(seen, table, batch.chances)
        read = replace(batch, pieces=batch.pieces.index_copy(0, batch.chosen, drawn))
        replaced = torch.zeros_like(batch.pieces, dtype=torch.bool).index_copy(0, batch.chosen, drawn != batch.labels)
        logits = widen(model.head(DETECTION_HEAD)(model.encode(read)))
        detection = binary_cross_entropy_with_logits(logits, replaced.to(logits.dtype), reduction="sum")
        found = logits > 0
        counts = (replaced.sum(), (found & replaced).sum(), (found & ~replaced).sum())
        return ReplacedLosses(masked, masked_correct, detection, *counts, drawn.new_full((), len(batch.pieces)))

    def sums(self, shape: Shape) -> tuple[str, ...]:  # noqa: ARG002
        return ReplacedLosses._fields

    def loss(self, losses: ReplacedLosses, batches: PretrainingBatches) -> Tensor:  # type: ignore[override]
        assert batches.pieces, "the pieces of the batch were not counted"
        detection = self.settings.detection_weight / batches.pieces * losses.detection
        return losses.masked / max(batches.predictions, 1) + detection

    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        predictions, replaced, pieces = max(totals["predictions"], 1), totals["replaced"], max(totals["read"], 1)
        return {
            "masked_loss": totals["masked"] / predictions,
            "masked_accuracy": totals["masked_correct"] / predictions,
            "detection_loss": totals["detection"] / pieces,
            "detected": totals["detected"] / max(replaced, 1),
            "false_alarms": totals["false_alarms"] / max(pieces - replaced, 1),
        }

    def total(self, figures: Mapping[str, float]) -> float:
        return figures["masked_loss"] + self.settings.detection_weight * figures["detection_loss"]

    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        found = f"{figures['detected']:{width}.1%}, false alarms {figures['false_alarms']:.1%}"
        return [
            f"generator {figures['masked_loss']:.4f} {figures['masked_accuracy']:{width}.1%}",
            f"replaced {figures['detection_loss']:.4f} found {found}",
        ]

    def list_notes(self, shape: Shape) -> list[str]:
        own = self.find_generator(shape)
        return [f"the generator has {own.layers} layers of {own.hidden}", *self.describe_masks()]

    # Its export.

    def logits(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:  # noqa: ARG002
        return {"replaced-piece": model.head(DETECTION_HEAD)(seen)}

    def pick_their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        return {"replaced-piece": output.logits[0, chosen]}

    def describe_heads(self, shape: Shape) -> str:  # noqa: ARG002
        return "head of replaced pieces, which says of every piece whether it was replaced"

    def loading_remark(self, shape: Shape) -> str:  # noqa: ARG002
        return "The generator, which replaced pieces in pre-training, is no part of it."


OBJECTIVE = ReplacedPieces()
