"""BERT's objective: masked pieces and, where the data has pairs, whether B follows A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from data_prep.common.toml_text import show_value
from pretraining.architectures.declaration import find_architecture
from pretraining.model.shape import PIECE_HEAD, Shape
from pretraining.objectives.declaration import Figure, Objective, ObjectiveSettings

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.shards import Manifest
    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.encoder import PretrainingModel
    from pretraining.model.masks import Masked
    from pretraining.model.rows import Draw, Rows


class MaskedLosses(NamedTuple):
    """The sums over a batch of a model that predicts only masked pieces."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    masked_correct: Tensor


class Losses(NamedTuple):
    """The sums over a batch of a model with both heads."""

    masked: Tensor
    """cross-entropy of the masked pieces"""
    next_sentence: Tensor
    """cross-entropy of next-sentence prediction"""
    masked_correct: Tensor
    next_sentence_correct: Tensor
    random_next: Tensor
    """sequences whose B does not follow A"""


Share = Annotated[float, Field(ge=0, le=1)]
MaskShare = Annotated[float, Field(gt=0, lt=1)]


class MaskedSettings(ObjectiveSettings):
    """The settings of masked pieces."""

    next_sentences: bool = True
    """mlm, hybrid: learn also whether B follows A, where the data has pairs. Without it the same pairs are read."""
    masks: Literal["static", "dynamic"] = "static"
    """mlm, hybrid, rtd: `static`, the masks in the data, or `dynamic`, new masks of single pieces in every epoch.
    Validation uses those in the data."""
    rate: MaskShare = 0.15
    """mlm, hybrid, rtd, dynamic masks: share of the pieces that is predicted, counting [CLS] and [SEP]."""
    last_rate: MaskShare | None = None
    """mlm, hybrid, rtd, dynamic masks: rate at the last step, reached linearly from `rate` (default: the same)."""
    split: Annotated[tuple[Share, Share, Share], Field(strict=False)] = (0.8, 0.1, 0.1)
    """mlm, hybrid, rtd, dynamic masks: of the predicted pieces, the shares that become [MASK], become a random piece,
    stay."""


MOST_ACROSS = 0.5
"""The rate that dynamic masks must be below where examples go across documents, of which each may be one piece."""
DYNAMIC = ("rate", "last_rate", "split")
"""The settings of dynamic masks; static masks are in the data."""


class MaskedPieces(Objective):
    """Predicts masked pieces; with pairs, the pooled [CLS] says whether B follows A."""

    settings_type = MaskedSettings
    settings: MaskedSettings
    learns = "predicts masked pieces"
    pairs_head = "the head for next sentences"
    needs_masks = True
    sum_of_pieces: str | None = "masked"
    tag, loads_as = "fill-mask", "AutoModelForMaskedLM"
    figures: ClassVar[tuple[Figure, ...]] = (
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
        unused = set() if self.is_dynamic else set(DYNAMIC)
        if self.settings.next_sentences and not shape.learns.pairs:  # the data decides
            unused.add("next_sentences")
        return [name for name in super().used_settings(shape) if name not in unused]

    @property
    def is_dynamic(self) -> bool:
        """Whether every epoch draws new masks."""
        return self.settings.masks == "dynamic"

    def mask_rate(self, done: float) -> float:
        """Computes the share of pieces that dynamic masks hide when this share of the steps is done."""
        first, last = self.settings.rate, self.settings.last_rate
        return first if last is None else first + (last - first) * done

    def faults(self, timed: bool) -> Iterator[str]:
        settings = self.settings
        if not self.is_dynamic:
            for name in DYNAMIC:
                if (value := getattr(settings, name)) != type(settings).model_fields[name].default:
                    yield (
                        f"objective.{name} = {show_value(value)}: static masks are in the data already; take "
                        'objective.masks = "dynamic", or make other data with shard.py --mask-rate'
                    )
        if timed and settings.last_rate is not None:
            yield (
                f"objective.last_rate = {show_value(settings.last_rate)}: moves with the steps of a run, which nobody "
                "knows where the clock decides (hours); give steps, or leave it out"
            )
        if abs(sum(settings.split) - 1) > 1e-6:
            made = f"the shares make {sum(settings.split):g}; they must make 1"
            yield f"objective.split = {show_value(settings.split)}: {made}"

    def data_faults(self, manifest: Manifest) -> Iterator[str]:
        if self.is_dynamic and manifest.settings.masking != "token":
            yield (
                'objective.masks = "dynamic": masks single pieces, and in this data whole words are masked; take '
                '"static", or make the data with shard.py --masking token'
            )
        rate = max(self.settings.rate, self.settings.last_rate or 0.0)
        if self.is_dynamic and manifest.settings.pairs == "full-sentences" and rate >= MOST_ACROSS:
            yield (
                f'objective.masks = "dynamic": a rate of {rate:g}, and up to half of an example of very short texts '
                f"is separators, which are never masked; take rates below {MOST_ACROSS}, or data of --pairs none"
            )

    @property
    def uses_pairs(self) -> bool:
        return self.settings.next_sentences

    def predictions(self, length: Any, masked: Any, done: float) -> Any:
        if not self.is_dynamic:
            return masked
        from pretraining.model.masks import count_masked

        return count_masked(length, self.mask_rate(done))

    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:
        from pretraining.model.batch import pack

        return pack(rows, *self.mask(rows, draw))

    def mask(self, rows: Rows, draw: Draw | None) -> Masked:
        """Masks examples: with the masks of the data, or with new ones in training with dynamic masks."""
        from pretraining.model.masks import Masked, Split, draw_masks

        if draw is None or not self.is_dynamic:
            return Masked(rows.pieces, rows.masked, rows.labels)
        return draw_masks(rows, self.mask_rate(draw.done), Split(*self.settings.split), draw)

    def heads(self, shape: Shape) -> dict[str, str]:
        masked = {PIECE_HEAD: "masked head"}
        return {"pooler": "pooler", **masked, "next_head": "next-sentence head"} if shape.learns.pairs else masked

    def needed_pieces(self, model: PretrainingModel, batch: PretrainingBatch) -> Tensor:
        import torch

        return torch.cat([batch.chosen, model.sequence_places(batch)]) if model.shape.learns.pairs else batch.chosen

    def num_needed(self, shape: Shape, sequences: int, predictions: float) -> float:
        return predictions + (sequences if shape.learns.pairs else 0)

    def losses(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> Losses | MaskedLosses:
        at_masks, of_sequences = seen.split_with_sizes([len(batch.chosen), len(seen) - len(batch.chosen)])
        masked, masked_correct = model.head(PIECE_HEAD)(at_masks, model.embeddings.word.weight, batch.labels)
        if not model.shape.learns.pairs:
            return MaskedLosses(masked, masked_correct)
        next_sentence, next_correct, random_next = self.sum_next_losses(model, of_sequences, batch.random_next)
        return Losses(masked, next_sentence, masked_correct, next_correct, random_next)

    def sum_next_losses(
        self, model: PretrainingModel, of_sequences: Tensor, labels: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums up, from the `first` sequence on, the losses of next-sentence prediction, the right ones, and the pairs
        whose B does not follow A. The heads compute all sequences: under ZeRO 3 all ranks have to call them."""
        from torch.nn.functional import cross_entropy

        logits, labels = self._next_logits(model, of_sequences).float()[first:], labels[first:]
        loss = cross_entropy(logits, labels, reduction="sum")
        return loss, (logits.argmax(1) == labels).sum(), labels.sum()

    def _next_logits(self, model: PretrainingModel, of_sequences: Tensor) -> Tensor:
        logits: Tensor = model.head("next_head")(model.head("pooler")(of_sequences))
        return logits

    def sums(self, shape: Shape) -> tuple[str, ...]:
        return (Losses if shape.learns.pairs else MaskedLosses)._fields

    def loss(self, losses: Losses | MaskedLosses, batches: PretrainingBatches) -> Tensor:
        masked = losses.masked / max(batches.predictions, 1)
        return masked if isinstance(losses, MaskedLosses) else masked + losses.next_sentence / batches.sequences

    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        predictions = max(totals["predictions"], 1)
        return {
            "masked_loss": totals["masked"] / predictions,
            "masked_accuracy": totals["masked_correct"] / predictions,
            **self.measure_next(totals, totals["sequences"]),
        }

    def measure_next(self, totals: Mapping[str, float], pairs: float) -> dict[str, float]:
        """Computes the figures of next-sentence prediction, if the model has learned it and there are pairs."""
        if "next_sentence" not in totals or not pairs:
            return {}
        random = totals["random_next"]
        return {
            "next_loss": totals["next_sentence"] / pairs,
            "next_accuracy": totals["next_sentence_correct"] / pairs,
            "next_larger_class": max(random, pairs - random) / pairs,
        }

    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        parts = [f"masked {figures['masked_loss']:.4f} {figures['masked_accuracy']:{width}.1%}"]
        if "perplexity" in figures:
            parts.append(f"perplexity {figures['perplexity']:.2f}")
        return parts + self.describe_next(figures)

    def describe_next(self, figures: Mapping[str, float]) -> list[str]:
        """Describes the figures of next-sentence prediction, if there are any."""
        if "next_loss" not in figures:
            return []
        larger = f"(larger class {figures['next_larger_class']:.1%})"
        return [f"next {figures['next_loss']:.4f} {figures['next_accuracy']:.1%} {larger}"]

    def list_notes(self, shape: Shape) -> list[str]:
        masks = self.describe_masks()
        if shape.learns.pairs:
            return masks
        kind = find_architecture(shape.architecture)
        missing = "the data has no pairs" if kind.learns_pairs(shape) else f"a {kind.title} has no head for pairs"
        why = missing if self.settings.next_sentences else "next sentences are left out"
        return [f"{why}: the model learns from masked pieces alone", *masks]

    def describe_masks(self) -> list[str]:
        """Describes dynamic masks in a line."""
        if not self.is_dynamic:
            return []
        shares = dict.fromkeys(f"{self.mask_rate(done):.3g}" for done in (0.0, 1.0))
        return [f"masks are drawn anew in every epoch, a share of {' to '.join(shares)} of the pieces"]

    def logits(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:
        at_masks, of_sequences = seen.split_with_sizes([len(batch.chosen), len(seen) - len(batch.chosen)])
        masked = {"masked": model.head(PIECE_HEAD).logits(at_masks, model.embeddings.word.weight)}
        return (
            {**masked, "next-sentence": self._next_logits(model, of_sequences)} if model.shape.learns.pairs else masked
        )

    def pick_their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        masked, *others = output.to_tuple()
        return {"masked": masked[0, chosen], **dict(zip(["next-sentence"], others, strict=False))}

    def describe_heads(self, shape: Shape) -> str:
        return "masked-language and next-sentence heads" if shape.learns.pairs else "masked-language head"

    def auto_class(self, shape: Shape) -> str:
        return "AutoModelForPreTraining" if shape.learns.pairs else self.loads_as

    def loading_remark(self, shape: Shape) -> str | None:
        if not shape.learns.pairs:
            return "There is no trained pooler: `AutoModel` draws one anew."
        return (
            "`AutoModel` and `AutoModelForMaskedLM` load parts of it; transformers then lists the weights of the other "
            "heads as unexpected, as it does for every BERT with both heads."
        )


OBJECTIVE = MaskedPieces()
