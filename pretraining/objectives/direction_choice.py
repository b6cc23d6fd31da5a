"""The ways in which a model may read: whether a piece sees both sides or those before it."""

from __future__ import annotations

from dataclasses import replace

from data_prep.common.errors import UserError
from pretraining.architectures.declaration import find_architecture
from pretraining.model.shape import SIDES, Sees, Shape
from pretraining.objectives.declaration import find_objective


def choose_way(shape: Shape, sees: Sees | None, where: str) -> Shape:
    """Returns the shape with this direction of attention; None keeps that of the objective. Raises UserError if the
    model has not learned it."""
    if sees is None:
        return shape
    objective, kind = find_objective(shape), find_architecture(shape.architecture)
    ways = {way: learns for way, learns in objective.list_ways(shape.learns).items() if way in kind.sees}
    if sees not in ways:
        learned = " or ".join(SIDES[way] for way in ways)
        raise UserError(
            f"--sees {sees}: a {kind.title} of {where} {objective.learns}, and its pieces learned to see {learned}; "
            f"leave --sees out, or name a model of the objective hybrid with a causal_share between 0 and 1"
        )
    return replace(shape, learns=ways[sees])
