"""Masked pieces, and whether B follows A where the data has pairs: what BERT learns by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Figure, Objective, ObjectiveSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.bert import Bert
    from pretraining.model.rows import Draw, Rows


class MaskedLosses(NamedTuple):
    """The loss and the right predictions of a model that predicts masked pieces alone, each summed over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    masked_correct: Tensor


class Losses(NamedTuple):
    """The losses and the right predictions of a model with both heads, each summed over a batch."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    next_sentence: Tensor
    """cross-entropy of whether B follows A"""
    masked_correct: Tensor
    next_sentence_correct: Tensor
    random_next: Tensor
    """sequences whose B does not follow A"""


class MaskedSettings(ObjectiveSettings):
    """What masked pieces add to the settings of all objectives."""

    next_sentences: bool = True
    """mlm: learn also whether B follows A, where the data has pairs. Without it the same pairs are read."""


class MaskedPieces(Objective):
    """Predicts masked pieces; with pairs, the pooled [CLS] says whether B follows A."""

    settings_type = MaskedSettings
    settings: MaskedSettings
    learns = "predicts masked pieces"
    pairs_head = "the head for next sentences"
    sum_of_pieces = "masked"
    tag, loads_as = "fill-mask", "AutoModelForMaskedLM"
    figures = (
        Figure("masked_loss", "masked loss", "nats", "cross-entropy of a masked piece", "masked-word loss"),
        Figure("perplexity", "perplexity", "pieces", "among how many the model hesitates: e to the masked loss"),
        Figure("masked_accuracy", "masked accuracy", "%", "masked pieces that are the model's first choice"),
        Figure(
            "next_loss",
            "next-sentence loss",
            "nats",
            "cross-entropy of whether the second segment follows the first",
            "next-sentence loss",
        ),
        Figure(
            "next_accuracy",
            "next-sentence accuracy",
            "%",
            "pairs of which the model says rightly whether they belong together",
        ),
        Figure("next_larger_class", "larger class of these", "%", "pairs that one and the same answer gets right"),
    )

    def used_settings(self, shape: Shape) -> list[str]:
        unused = set() if shape.pairs or not self.settings.next_sentences else {"next_sentences"}
        return [name for name in super().used_settings(shape) if name not in unused]

    @property
    def pairs(self) -> Literal["used", "unused"]:
        return "used" if self.settings.next_sentences else "unused"

    def predictions(self, length: Any, masked: Any, done: float) -> Any:  # noqa: ARG002
        return masked

    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:  # noqa: ARG002
        from pretraining.model.batch import pack

        return pack(rows, rows.pieces, rows.masked, rows.labels)

    def heads(self, shape: Shape) -> dict[str, str]:
        masked = {"masked_head": "masked head"}
        return {"pooler": "pooler", **masked, "next_head": "next-sentence head"} if shape.pairs else masked

    def build(self, shape: Shape) -> dict[str, nn.Module]:
        from torch import nn

        from pretraining.model.bert import MaskedHead

        if not shape.pairs:
            return {"masked_head": MaskedHead(shape)}
        pooler, next_head = nn.Linear(shape.hidden, shape.hidden), nn.Linear(shape.hidden, 2)
        return {"pooler": pooler, "masked_head": MaskedHead(shape), "next_head": next_head}

    def parameters(self, shape: Shape) -> int:
        h = shape.hidden
        return h * h + h + 2 * h + shape.vocabulary + ((h * h + h) + (2 * h + 2) if shape.pairs else 0)

    def flops(self, shape: Shape, sequences: int, predictions: float) -> float:
        h = shape.hidden
        masked = 2 * (h * h + h * shape.vocabulary) * predictions
        return masked + (2 * (h * h + 2 * h) * sequences if shape.pairs else 0)

    def losses(self, model: Bert, hidden: Tensor, batch: PretrainingBatch) -> Losses | MaskedLosses:
        from torch.nn.functional import cross_entropy

        decoder = model.embeddings.word.weight
        masked, masked_correct = model.head("masked_head")(hidden[batch.chosen], decoder, batch.labels)
        if not model.shape.pairs:
            return MaskedLosses(masked, masked_correct)
        logits = self._next_logits(model, hidden, batch).float()
        next_sentence = cross_entropy(logits, batch.random_next, reduction="sum")
        next_correct = (logits.argmax(1) == batch.random_next).sum()
        return Losses(masked, next_sentence, masked_correct, next_correct, batch.random_next.sum())

    def _next_logits(self, model: Bert, hidden: Tensor, batch: PretrainingBatch) -> Tensor:
        logits: Tensor = model.head("next_head")(model.head("pooler")(model.sequence_states(hidden, batch)).tanh())
        return logits

    def sums(self, shape: Shape) -> tuple[str, ...]:
        return (Losses if shape.pairs else MaskedLosses)._fields

    def loss(self, losses: Losses | MaskedLosses, batches: PretrainingBatches) -> Tensor:
        masked = losses.masked / max(batches.predictions, 1)
        return masked if isinstance(losses, MaskedLosses) else masked + losses.next_sentence / batches.sequences

    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        predictions, sequences = max(totals["predictions"], 1), max(totals["sequences"], 1)
        figures = {
            "masked_loss": totals["masked"] / predictions,
            "masked_accuracy": totals["masked_correct"] / predictions,
        }
        if "next_sentence" in totals:
            random = totals["random_next"]
            figures["next_loss"] = totals["next_sentence"] / sequences
            figures["next_accuracy"] = totals["next_sentence_correct"] / sequences
            figures["next_larger_class"] = max(random, sequences - random) / sequences
        return figures

    def total(self, figures: Mapping[str, float]) -> float:
        return figures["masked_loss"] + figures.get("next_loss", 0.0)

    def score(self, figures: Mapping[str, float]) -> dict[str, float]:
        return {**figures, "perplexity": math.exp(min(figures["masked_loss"], 700.0))}

    def said(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        parts = [f"masked {figures['masked_loss']:.4f} {figures['masked_accuracy']:{width}.1%}"]
        if "perplexity" in figures:
            parts.append(f"perplexity {figures['perplexity']:.2f}")
        if "next_loss" in figures:
            larger = f"(larger class {figures['next_larger_class']:.1%})"
            parts.append(f"next {figures['next_loss']:.4f} {figures['next_accuracy']:.1%} {larger}")
        return parts

    def note(self, shape: Shape) -> str | None:
        if shape.pairs:
            return None
        why = "the data has no pairs" if self.settings.next_sentences else "next sentences are left out"
        return f"{why}: the model learns from masked pieces alone"

    def architecture(self, shape: Shape) -> str:
        return "BertForPreTraining" if shape.pairs else "BertForMaskedLM"

    def logits(self, model: Bert, hidden: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:
        decoder = model.embeddings.word.weight
        masked = {"masked": model.head("masked_head").logits(hidden[batch.chosen], decoder)}
        return {**masked, "next-sentence": self._next_logits(model, hidden, batch)} if model.shape.pairs else masked

    def their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        masked, *others = output.to_tuple()
        return {"masked": masked[0, chosen], **dict(zip(["next-sentence"], others, strict=False))}

    def described(self, shape: Shape) -> str:
        return "masked-language and next-sentence heads" if shape.pairs else "masked-language head"

    def auto_class(self, shape: Shape) -> str:
        return "AutoModelForPreTraining" if shape.pairs else self.loads_as

    def loading_remark(self, shape: Shape) -> str | None:
        if not shape.pairs:
            return "There is no trained pooler: `AutoModel` draws one anew."
        return (
            "`AutoModel` and `AutoModelForMaskedLM` load parts of it; transformers then lists the weights of the other "
            "heads as unexpected, as it does for every BERT with both heads."
        )


OBJECTIVE = MaskedPieces()
