"""Adam with decoupled decay, in PyTorch's fused form."""

from __future__ import annotations

from pretraining.optimizers.declaration import Optimizer


class AdamWDeclaration(Optimizer):
    title = summary = "AdamW"
    state = ("exp_avg", "exp_avg_sq")
    traffic = 34


OPTIMIZER = AdamWDeclaration()
