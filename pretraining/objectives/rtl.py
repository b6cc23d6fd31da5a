"""Right to left: predicts every piece from those after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pretraining.model.shape import Shape
from pretraining.objectives.ltr import LeftToRight

if TYPE_CHECKING:
    from data_prep.common.arrays import Array
    from pretraining.model.rows import Rows


class RightToLeft(LeftToRight):
    """Predicts every piece of a sequence from those after it, down to the one behind [CLS]."""

    sees = "after"
    learns = "predicts the piece before"

    def predictions(self, length: Any, masked: Any, done: float) -> Any:  # noqa: ARG002
        return length - 2

    def _find_predicted(self, rows: Rows) -> tuple[Array, Array]:
        """Returns the places that predict a piece, all but the first two, and the places of these pieces, one
        earlier."""
        import numpy as np

        chosen = np.delete(np.arange(len(rows.pieces)), np.concatenate([rows.starts, rows.starts + 1]))
        return chosen, chosen - 1

    def describe_heads(self, shape: Shape) -> str:  # noqa: ARG002
        return "language head, which predicts every piece from those after it"


OBJECTIVE = RightToLeft()
