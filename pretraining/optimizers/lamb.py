"""LAMB: Adam's updates with a trust ratio for each matrix (You et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

from data_prep.common.sections import Removed
from pretraining.optimizers.declaration import Optimizer, OptimizerSettings


class LambSettings(OptimizerSettings):
    """LAMB has no settings of its own."""

    removed: ClassVar = {
        "normalize": Removed(False, "optimizer.clip limits gradients"),
        "trust_limits": Removed(None, "trust ratios have no limits"),
        "trust_all": Removed(False, "biases and norms have no trust ratios, as in NVIDIA's LAMB"),
        "kernels": Removed("auto", "our own kernels are used where they work"),
    }


class LambDeclaration(Optimizer):
    title, summary = "LAMB", "LAMB for large batches"
    settings = LambSettings
    state = ("exp_avg", "exp_avg_sq")
    traffic = 46  # as Adam, and the update is written and read once more


OPTIMIZER = LambDeclaration()
