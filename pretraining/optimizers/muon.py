"""Muon: matrices of layers move by the orthogonal matrix nearest to their momentum, all other weights by Adam's rule.

Few singular values of a gradient are large, and directions with small ones are hardly learned. Muon gives all of them
one size (Jordan et al., 2024), scaled so that an update is about as large as Adam's usually are (Liu et al., 2025):
both take the same learning rates and decay. Rows of the nearest orthogonal matrix still differ in size: where rows are
`even`, each is divided by its usual size (NorMuon; Li et al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from data_prep.common.sections import Removed
from pretraining.model.shape import Role
from pretraining.optimizers.declaration import Optimizer, OptimizerSettings

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: repeated, a x + b x³ + c x⁵ brings singular values near 1 fastest, to between 0.7 and 1.2."""
ROUNDS = 5
MOMENTUM = 0.95
"""How slowly the momentum of matrices forgets, as Jordan et al. and Liu et al. have it."""
USUAL = 0.2
"""The usual root mean square of an update of Adam."""
ROW_MEMORY = 0.95
"""How slowly the usual size of a row forgets, as Li et al. have it."""


class MuonSettings(OptimizerSettings):
    """The settings of Muon."""

    removed: ClassVar = {"momentum": Removed(MOMENTUM, "Jordan's value serves models of all sizes")}
    even_rows: bool = False
    """muon: give all neurons, which are the rows of a matrix, updates of one size, as NorMuon does."""


class MuonDeclaration(Optimizer):
    title, summary = "Muon", "Muon for few steps"
    settings = MuonSettings
    state = ("exp_avg", "exp_avg_sq")
    traffic = 34
    whole_matrices = True

    def facts(self, settings: OptimizerSettings) -> list[str]:
        assert isinstance(settings, MuonSettings)
        rows = ", with even rows" if settings.even_rows else ""
        return [f"matrices of layers by momentum {MOMENTUM:g}{rows}, all else by Adam", *super().facts(settings)]

    def update(
        self,
        role: Role,
        weight: Tensor,  # noqa: ARG002
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: Tensor,
        settings: OptimizerSettings,
    ) -> Tensor:
        """Defines the update of a weight. Training makes it in `steps/muon.py`, which tests compare with this."""
        if role.kind == "matrix":
            momentum = state["exp_avg"].lerp_(gradient, 1 - MOMENTUM)
            ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
            assert isinstance(settings, MuonSettings)
            return scale_update(orthogonalize(ahead), state["exp_avg_sq"] if settings.even_rows else None)
        average = state["exp_avg"].lerp_(gradient, 1 - settings.betas[0])
        square = state["exp_avg_sq"].lerp_(gradient.square(), 1 - settings.betas[1])
        first, second = ((1 - beta**step) if settings.bias_correction else 1.0 for beta in settings.betas)
        return (average / first).div_((square / second).sqrt_().add_(settings.epsilon))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximates the nearest orthogonal matrix, with the same singular vectors; of each matrix of a stack.

    Each round multiplies the matrix. To multiply the factors of all rounds first would take less time, but their
    product has numbers up to 480, and its rounding to 16 bits is an error as large as the result.
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        return orthogonalize(matrix.mT).mT
    a, b, c = COEFFICIENTS
    add_product = "addmm" if matrix.dim() == 2 else "baddbmm"
    matrix = matrix / matrix.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = matrix @ matrix.mT
        factor = getattr(square, add_product)(square, square, beta=b, alpha=c)
        matrix = getattr(matrix, add_product)(factor, matrix, beta=a)
    return matrix


def scale_update(matrix: Tensor, squares: Tensor | None) -> Tensor:
    """Scales an orthogonal matrix to an update, in fp32; each matrix of a stack.

    With `squares`, rows are divided by their usual sizes: the first column has the mean squares of the rows, and moves.
    """
    change, sides = matrix.float(), matrix.shape[-2:]
    if squares is None:
        return change * (USUAL * math.sqrt(max(sides)))
    usual = squares[..., :1].lerp_(change.square().mean(-1, keepdim=True), 1 - ROW_MEMORY).sqrt()
    change = change / usual.clamp(min=1e-7)
    size: Tensor = change.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    return change * (USUAL * math.sqrt(math.prod(sides)) / size)


OPTIMIZER = MuonDeclaration()
