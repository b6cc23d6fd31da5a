"""Left to right: predicts every piece from those before it, as language models do.

The shards are those of masked pieces: the pieces that masks hide are restored, so that all objectives read the same
text. Segments stay where the data has pairs; next sentences are not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pretraining.model.shape import PIECE_HEAD, Sees, Shape
from pretraining.objectives.declaration import Figure, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.common.arrays import Array
    from pretraining.model.batch import PretrainingBatch, PretrainingBatches
    from pretraining.model.encoder import PretrainingModel
    from pretraining.model.rows import Draw, Rows


class PieceLosses(NamedTuple):
    """The sums over a batch: the loss, and the right predictions."""

    nats: Tensor
    """cross-entropy of the pieces"""
    correct: Tensor
    """pieces that were the model's first choice"""


class LeftToRight(Objective):
    """Predicts every piece of a sequence from those before it; [CLS] begins all sequences and is never predicted."""

    sees: ClassVar[Sees] = "before"
    logits_at_once = 1024
    learns = "predicts the next piece"
    tag, loads_as = "text-generation", "AutoModelForCausalLM"
    sum_of_pieces = "nats"
    figures = (
        Figure("piece_loss", "piece loss", "nats", "cross-entropy of a piece", "loss of pieces"),
        Figure("perplexity", "perplexity", "pieces", "among how many the model hesitates: e to the loss of pieces"),
        Figure("piece_accuracy", "piece accuracy", "%", "pieces that are the model's first choice"),
    )

    def predictions(self, length: Any, masked: Any, done: float) -> Any:  # noqa: ARG002
        return length - 1

    def batch(self, rows: Rows, draw: Draw | None = None) -> PretrainingBatch:  # noqa: ARG002
        from pretraining.model.batch import pack

        text = rows.restore_text()
        chosen, predicted = self._find_predicted(rows)
        return pack(rows, text, chosen, text[predicted])

    def _find_predicted(self, rows: Rows) -> tuple[Array, Array]:
        """Returns the places that predict a piece, all but the last, and the places of these pieces, one later."""
        import numpy as np

        chosen = np.delete(np.arange(len(rows.pieces)), rows.starts + rows.lengths - 1)
        return chosen, chosen + 1

    def heads(self, shape: Shape) -> dict[str, str]:  # noqa: ARG002
        return {PIECE_HEAD: "language head"}

    def losses(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> PieceLosses:
        return PieceLosses(*model.head(PIECE_HEAD)(seen, model.embeddings.word.weight, batch.labels))

    def sums(self, shape: Shape) -> tuple[str, ...]:  # noqa: ARG002
        return PieceLosses._fields

    def loss(self, losses: PieceLosses, batches: PretrainingBatches) -> Tensor:
        return losses.nats / max(batches.predictions, 1)

    def measure(self, totals: Mapping[str, float]) -> dict[str, float]:
        predictions = max(totals["predictions"], 1)
        return {"piece_loss": totals["nats"] / predictions, "piece_accuracy": totals["correct"] / predictions}

    def describe_figures(self, figures: Mapping[str, float], width: int = 0) -> list[str]:
        parts = [f"pieces {figures['piece_loss']:.4f} {figures['piece_accuracy']:{width}.1%}"]
        if "perplexity" in figures:
            parts.append(f"perplexity {figures['perplexity']:.2f}")
        return parts

    def logits(self, model: PretrainingModel, seen: Tensor, batch: PretrainingBatch) -> dict[str, Tensor]:  # noqa: ARG002
        return {"language": model.head(PIECE_HEAD).logits(seen, model.embeddings.word.weight)}

    def pick_their_logits(self, output: Any, chosen: Tensor) -> dict[str, Tensor]:
        return {"language": output.logits[0, chosen]}

    def loading_remark(self, shape: Shape) -> str | None:  # noqa: ARG002
        return (
            "The tokenizer ends a text with `[SEP]`. To go on with one, leave it out: "
            "`model.generate(tokenizer(text, return_tensors='pt').input_ids[:, :-1])`."
        )

    def describe_heads(self, shape: Shape) -> str:  # noqa: ARG002
        return "language head, which predicts every piece from those before it"


OBJECTIVE = LeftToRight()
