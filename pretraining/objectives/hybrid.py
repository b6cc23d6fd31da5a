"""Masked pieces and left to right in one model (GPT-BERT): some sequences are read left to right, the others have
masks, and one head predicts the pieces of either. With pairs, the sequences with masks also learn whether B follows A.

A masked piece is predicted as the next piece is: from the state of the piece before it. Which sequences are read left
to right follows from their random keys, so that it is the same on any ranks. In a batch they come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from pretraining.model.shape import PIECE_HEAD, Learning, Sees, Shape
from pretraining.objectives.declaration import Figure
from pretraining.objectives.ltr import LeftToRight
from pretraining.objectives.mlm import Losses, MaskedLosses, MaskedPieces, MaskedSettings

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.common.arrays import Array
    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.encoder import PretrainingModel
    from pretraining.model.masks import Masked
    from pretraining.model.rows import Draw, Rows


class HybridLosses(NamedTuple):
    """The sums over a batch with sequences of either kind."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    masked_correct: Tensor
    nats: Tensor
    """cross-entropy of the pieces of sequences that are read left to right"""
    correct: Tensor
    one_way: Tensor
    """the number of these pieces"""
    next_sentence: Tensor
    """cross-entropy of next-sentence prediction in sequences with masks"""
    next_sentence_correct: Tensor
    random_next: Tensor
    """sequences with masks whose B does not follow A"""
    pairs: Tensor
    """sequences with masks, if the model learns from pairs"""


AnyLosses = HybridLosses | Losses | MaskedLosses


class HybridSettings(MaskedSettings):
    """The settings of masked pieces, and how many sequences are read left to right instead."""

    causal_share: Annotated[float, Field(ge=0, lt=1)] = 0.0625
    """hybrid: share of the sequences read left to right, and the weight of their loss; the others have masks."""


class Hybrid(MaskedPieces):
    """Predicts masked pieces, and in a share of the sequences all pieces from left to right."""

    settings_type = HybridSettings
    settings: HybridSettings
    model_settings = ("causal_share",)
    logits_at_once = 1024
    shift, named_in_config = 1, True
    learns = "predicts masked pieces and, in some sequences, every next piece"
    reading = "The logits at a piece predict the next one: for a `[MASK]`, read those at the piece before it."
    figures: ClassVar[tuple[Figure, ...]] = tuple(
        figure for figure in (*MaskedPieces.figures, *LeftToRight.figures) if figure.name != "perplexity"
    )

    def __init__(self, settings: HybridSettings | None = None) -> None:
        super().__init__(settings)
        self.share = self.settings.causal_share
        self.sum_of_pieces = None if self.share else "masked"  # losses of two ways are no likelihood of a text

    def list_ways(self, learns: Learning) -> dict[Sees, Learning]:
        ways: dict[Sees, Learning] = {"both": replace(learns, settings=(("causal_share", 0.0),))}
        return {**ways, "before": Learning("ltr", False, "before")} if self.share else ways

    def predictions(self, length: Any, masked: Any, done: float) -> Any:
        return self.share * (length - 1) + (1 - self.share) * super().predictions(length, masked, done)

    def most_predictions(self, length: int, masked: int) -> int:
        return length - 1 if self.share else super().most_predictions(length, masked)

    def draw_one_way(self, keys: Array) -> Array | None:
        import numpy as np

        from data_prep.common.hashing import scramble_bits

        numbers = scramble_bits(keys ^ np.uint64(0x6879627269640000))  # not those that masks are drawn by
        drawn: Array = (numbers >> np.uint64(11)) * 2.0**-53 < self.share
        return drawn

    def count_predictions(self, lengths: Array, masked: Array, done: float, one_way: Array | None) -> Array:
        import numpy as np

        counts = super().predictions(lengths, masked, done)
        return counts if one_way is None else np.where(one_way, lengths - 1, counts)

    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:
        """Makes a batch; without draws its sequences are read left to right, which takes the most memory."""
        if draw is None:
            return self._mix(rows, self.mask(rows, draw), len(rows.lengths) if self.share else 0)
        one_way = self.draw_one_way(draw.keys)
        assert one_way is not None
        count = int(one_way.sum())
        assert one_way[:count].all(), "they come first"
        return self._mix(rows, self.mask(rows, draw), count)

    def validation_batch(self, rows: Rows) -> PretrainingBatch:
        """Makes a batch with every example twice, to be read either way, if the model learns both."""
        if not self.share:
            return self.batch(rows)
        twice = rows.repeat()
        return self._mix(twice, self.mask(twice, None), len(rows.lengths))

    def _mix(self, rows: Rows, masked: Masked, one_way: int) -> PretrainingBatch:
        """Makes a batch of the text of the first `one_way` examples and of the masked pieces of the others."""
        import numpy as np

        from pretraining.model.batch import pack

        end = int(rows.lengths[:one_way].sum())
        text, others = rows.restore_text()[:end], masked.chosen >= end
        following = np.delete(np.arange(end), (rows.starts + rows.lengths - 1)[:one_way])
        chosen = np.concatenate([following, masked.chosen[others] - self.shift])
        labels = np.concatenate([text[following + 1], masked.labels[others]])
        return pack(rows, np.concatenate([text, masked.pieces[end:]]), chosen, labels, one_way)

    def heads(self, shape: Shape) -> dict[str, str]:
        return {**super().heads(shape), PIECE_HEAD: "language head"}

    def losses(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> AnyLosses:  # type: ignore[override]
        if not self.share:
            return super().losses(model, seen, batch)
        count, end = sum(batch.lengths[: batch.one_way]) - batch.one_way, len(batch.labels)
        nats, correct = self._sum_losses(model, seen[:count], batch.labels[:count], seen)
        masked, masked_correct = self._sum_losses(model, seen[count:end], batch.labels[count:], seen)
        of_next, pairs = (0 * masked, 0 * correct, 0 * correct), 0
        if model.shape.learns.pairs:
            of_next = self.sum_next_losses(model, seen[end:], batch.random_next, batch.one_way)
            pairs = len(batch.lengths) - batch.one_way
        one_way, of_pairs = correct.new_full((), count), correct.new_full((), pairs)
        return HybridLosses(masked, masked_correct, nats, correct, one_way, *of_next, of_pairs)

    def _sum_losses(
        self, model: PretrainingModel, seen: Tensor, labels: Tensor, every: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sums up the losses and the right predictions of these states. Of none, the head computes one of the others
        for nothing: under ZeRO 3 all ranks have to call it equally often."""
        from pretraining.model.losses import keep_losses

        head, decoder = model.head(PIECE_HEAD), model.embeddings.word.weight
        if len(labels):
            loss, correct = head(seen, decoder, labels)
            return loss, correct
        with keep_losses():
            loss, correct = head(every[:1], decoder, labels.new_zeros(1))
        return 0 * loss, 0 * correct

    def sums(self, shape: Shape) -> tuple[str, ...]:
        return HybridLosses._fields if shape.learns.causal_share else super().sums(shape)

    def loss(self, losses: AnyLosses, batches: PretrainingBatches) -> Tensor:
        if isinstance(losses, (MaskedLosses, Losses)):
            return super().loss(losses, batches)
        one_way, masked = batches.one_way, batches.predictions - batches.one_way
        share = self.share if one_way and masked else float(one_way > 0)
        of_next = losses.next_sentence / max(batches.sequences - batches.one_way_sequences, 1)
        of_masked = losses.masked / max(masked, 1) + of_next
        return share * losses.nats / max(one_way, 1) + (1 - share) * of_masked

    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        one_way = totals.get("one_way", 0.0)
        figures = {}
        if masked := totals["predictions"] - one_way:
            figures = {"masked_loss": totals["masked"] / masked, "masked_accuracy": totals["masked_correct"] / masked}
        if one_way:
            figures |= {"piece_loss": totals["nats"] / one_way, "piece_accuracy": totals["correct"] / one_way}
        return {**figures, **self.measure_next(totals, totals.get("pairs", totals.get("sequences", 0.0)))}

    def total(self, figures: Mapping[str, float]) -> float:
        of_masked = figures.get("masked_loss", 0.0) + figures.get("next_loss", 0.0)
        share = self.share if {"masked_loss", "piece_loss"} <= figures.keys() else float("piece_loss" in figures)
        return share * figures.get("piece_loss", 0.0) + (1 - share) * of_masked

    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        said = [
            f"{title} {figures[f'{name}_loss']:.4f} {figures[f'{name}_accuracy']:{width}.1%}"
            for title, name in (("masked", "masked"), ("pieces", "piece"))
            if f"{name}_loss" in figures
        ]
        return said + self.describe_next(figures)

    def list_notes(self, shape: Shape) -> list[str]:
        ways = f"a share of {self.share:g} of the sequences is read left to right, the others have masks"
        if shape.learns.pairs:
            ways += ", and these learn whether B follows A"
        return [ways, *self.describe_masks()]

    def describe_heads(self, shape: Shape) -> str:
        either = ", masked or not," if shape.learns.causal_share else ", masked,"
        head = f"language head, which predicts a piece{either} at the piece before it"
        return f"{head}, and next-sentence head" if shape.learns.pairs else head

    def loading_remark(self, shape: Shape) -> str | None:
        pooler = "" if shape.learns.pairs else " There is no trained pooler: `AutoModel` draws one anew."
        return (
            f"{self.reading} The fill-mask pipeline of transformers reads them at the `[MASK]`, which is wrong.{pooler}"
        )


OBJECTIVE = Hybrid()
