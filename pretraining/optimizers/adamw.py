"""Adam with decoupled decay, in PyTorch's fused form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pretraining.optimizers.declaration import Optimizer, OptimizerSettings

if TYPE_CHECKING:
    from pretraining.optimizers.steps.adamw import AdamW


class AdamWDeclaration(Optimizer):
    title = summary = "AdamW"
    state = ("exp_avg", "exp_avg_sq")
    traffic = 34

    def build(self, groups: Sequence[dict[str, Any]], settings: OptimizerSettings) -> AdamW:
        from pretraining.optimizers.steps.adamw import AdamW

        return AdamW(self, groups, settings)


OPTIMIZER = AdamWDeclaration()
