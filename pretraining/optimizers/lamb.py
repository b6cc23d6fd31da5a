"""LAMB: Adam's updates with a trust ratio for each parameter (You et al., 2020); NVIDIA apex's kernels on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from data_prep.common.toml_text import show_value
from pretraining.optimizers.declaration import Optimizer, OptimizerSettings, Placement


class LambSettings(OptimizerSettings):
    """Settings that LAMB alone has."""

    normalize: bool = False
    """LAMB: divide the gradient by its norm, also where that is small; clip has nothing to do then."""
    trust_limits: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """LAMB: smallest and largest trust ratio."""
    trust_all: bool = False
    """LAMB: trust ratios for biases and norms too."""
    kernels: Literal["auto", "apex", "torch"] = "auto"
    """LAMB on a GPU: NVIDIA apex's where it is installed, or PyTorch's own alone."""


class LambDeclaration(Optimizer):
    title, summary = "LAMB", "LAMB for large batches"
    settings = LambSettings
    state = ("exp_avg", "exp_avg_sq")
    traffic = 46  # as Adam, and the update is written and read once more

    def limit(self, settings: OptimizerSettings) -> float:
        return 0.0 if cast_settings(settings).normalize else settings.clip

    def faults(self, settings: OptimizerSettings, place: Placement) -> Iterator[str]:
        own = cast_settings(settings)
        limits = own.trust_limits
        if limits is not None and not 0 <= limits[0] < limits[1]:
            yield f"optimizer.trust_limits = {show_value(list(limits))}: the smallest ratio, then the largest"
        at = 'optimizer.kernels = "apex"'
        if own.kernels != "apex" or place.found is None:
            return
        if place.device == "cpu" or place.found == "cpu" or place.offload != "none":
            yield f'{at}: needs a GPU, and parallel.offload = "none"; take "auto"'
        elif fault := find_apex_fault():
            yield f'{at}: {fault}, or take "auto"'

    def facts(self, settings: OptimizerSettings) -> list[str]:
        own = cast_settings(settings)
        facts = super().facts(settings)
        if own.trust_limits:
            facts.append("trust ratios from {:g} to {:g}".format(*own.trust_limits))
        if own.trust_all:
            facts.append("trust ratios for biases and norms too")
        if own.normalize:
            facts.append("gradients divided by their norm")
        return facts


def cast_settings(settings: OptimizerSettings) -> LambSettings:
    """Casts a recipe's settings, which have those of all optimizers."""
    assert isinstance(settings, LambSettings)
    return settings


def find_apex_fault() -> str | None:
    """Says why NVIDIA apex's kernels cannot be loaded, with the cure; None where they can."""
    try:
        importlib.import_module("amp_C")
    except ImportError:
        cure = "build NVIDIA's from its source: docs/training.md has the command"
        return f"apex is not installed with its kernels (on PyPI that name is another project's); {cure}"
    return None


OPTIMIZER = LambDeclaration()
