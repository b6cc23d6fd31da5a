"""Adam with decoupled decay, in PyTorch's fused form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.optimizers.declaration import Optimizer

if TYPE_CHECKING:
    from pretraining.optimizers.steps.adamw import AdamW


class AdamWDeclaration(Optimizer):
    title = summary = "AdamW"
    state = ("exp_avg", "exp_avg_sq")
    traffic = 34

    def steps(self) -> type[AdamW]:
        from pretraining.optimizers.steps.adamw import AdamW

        return AdamW


OPTIMIZER = AdamWDeclaration()
