"""DeepSpeed's configuration, made of the sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pretraining.config.settings import Compute, Optimizer, Parallel, Precision

NEVER = 1 << 40
BUCKET = 500_000_000
"""The elements of a bucket of gradients: DeepSpeed's default, for which it allocates memory in any case."""
LOSS_SCALE = {"initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1.0}
"""DeepSpeed's defaults of fp16: the scale begins at 2^16, doubles after 1,000 steps without overflow, and is at least
1."""


@dataclass(frozen=True)
class EngineSettings:
    """The sections of a recipe that an engine needs, for any model."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    parallel: Parallel = field(default_factory=Parallel)
    compute: Compute = field(default_factory=Compute)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """settings of DeepSpeed itself"""

    def zero_stage(self, dtype: torch.dtype) -> int:
        """Returns the ZeRO stage that DeepSpeed runs: 1 instead of 0 where that would add up gradients in 16 bits."""
        return 1 if self.parallel.zero == 0 and dtype != torch.float32 else self.parallel.zero


def make_deepspeed_config(
    settings: EngineSettings, dtype: torch.dtype, device: torch.device, ranks: int, parameters: int
) -> dict[str, Any]:
    """Makes DeepSpeed's configuration for a model with this number of parameters.

    Its batch sizes have no effect: `train_step` decides where a step ends.
    """
    stage = settings.zero_stage(dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.optimizer.clip if stage else 0.0,  # without ZeRO, Engine.step clips
        "steps_per_print": NEVER,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU twice a micro-batch
        "zero_optimization": _zero_config(settings.parallel, stage, device, parameters),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # for gradients too, so that the number of ranks does not matter
        **_precision_config(dtype),
    }
    return _merge(config, settings.deepspeed)


def _zero_config(parallel: Parallel, stage: int, device: torch.device, parameters: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(BUCKET, parameters)}
    if device.type == "cpu":
        zero["overlap_comm"] = False
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if parallel.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _precision_config(dtype: torch.dtype) -> dict[str, Any]:
    if dtype == torch.bfloat16:
        return {"bf16": {"enabled": True, "immediate_grad_update": True}}
    if dtype == torch.float16:
        return {"fp16": {"enabled": True, **LOSS_SCALE}}
    return {}


def _merge(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the recipe's own settings of DeepSpeed to a configuration, table by table."""
    result = dict(config)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merge(result[name], value) if both else value
    return result
