"""Sets up DeepSpeed's engine, and says which of its parts are replaced, and why.

    DeepSpeedEngine     by `EngineWithZero1`, whose optimizer for ZeRO 1 makes fewer passes over gradients
    _update_scale       so that the loss scale of fp16 grows after a step (`let_scale_grow_after_step`)
    compiler.compile    by nothing: its Muon, which others import, would load all of PyTorch's compiler, for seconds
    see_memory_usage    by nothing: it collects garbage four times, a second in all, to print the memory in use
    __compatible_ops__  by none: it would try its compilers, and compile an operation that only inference calls
    groups.mpu          by this engine's own; it would keep that of an engine before

All of it rests on names that change from version to version, so no other version than `VERSION` is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import bf16_optimizer, compiler
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from pydantic import ValidationError

from data_prep.common.errors import UserError
from pretraining.engine.deepspeed_config import EngineSettings, make_deepspeed_config
from pretraining.engine.fixed_point import FixedPointZero1
from pretraining.engine.gradients import Zero1
from pretraining.mesh.mesh import Mesh, make_mpu
from pretraining.model.encoder import Trainable
from pretraining.optimizers.steps.flat import FlatOptimizer

VERSION = "0.19.8"
"""The version of DeepSpeed whose parts these are, as pyproject.toml pins it."""


class EngineWithZero1(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine, with `Zero1` in bf16 and fp32 where possible, and a callback for this rank's gradients."""

    on_own_gradients: Callable[[], None] = staticmethod(lambda: None)
    """called at the end of each backward pass; under ZeRO 0 and 1 before this rank waits for the gradients of others"""

    def _backward_epilogue(self) -> None:
        self.on_own_gradients()
        super()._backward_epilogue()

    def _configure_bf16_optimizer(self, optimizer: FlatOptimizer) -> Zero1:
        return FixedPointZero1(optimizer, self) if optimizer.same_bits else Zero1(optimizer, self)

    def _configure_zero_optimizer(self, optimizer: FlatOptimizer) -> Any:
        fits = self.zero_optimization_stage() == 1 and self.get_data_types()[0] == torch.float32
        if fits and not self.zero_cpu_offload():
            return self._configure_bf16_optimizer(optimizer)
        return super()._configure_zero_optimizer(optimizer)


def initialize_deepspeed(
    model: Trainable,
    optimizer: FlatOptimizer,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
) -> EngineWithZero1:
    """Does what `deepspeed.initialize` does for a model of ours, with the replaced parts."""
    if deepspeed.__version__.partition("+")[0] != VERSION:
        raise UserError(f"DeepSpeed is {deepspeed.__version__}\npip install deepspeed=={VERSION}")
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.utils.groups.mpu = mpu = make_mpu(mesh)
    deepspeed.ops.__compatible_ops__ = {}
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    compiler.compile = lambda: lambda function: function
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = make_deepspeed_config(settings, dtype, device, mesh.data_ranks, parameters)
    backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
    deepspeed.comm.init_distributed(backend, dist_init_required=False)
    try:
        return EngineWithZero1(
            args=SimpleNamespace(device_rank=device.index or 0),  # a rank that sees its own GPU alone calls it 0
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
    except ValidationError as error:  # of the recipe's own settings of DeepSpeed
        faults = [f"deepspeed: {'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise UserError("\n".join(faults)) from error


def let_scale_grow_after_step(optimizer: Any) -> Callable[[], None]:
    """Returns a function that lets the loss scale of fp16 grow, to be called after each step. DeepSpeed lets it grow
    within the step, and divides by the new scale the gradients that the old one multiplied, which halves them."""
    update, overflowed = optimizer._update_scale, True

    def update_or_wait(has_overflow: bool = False) -> None:
        nonlocal overflowed
        overflowed = has_overflow
        if has_overflow:
            update(has_overflow)

    def grow() -> None:
        if not overflowed:
            update(False)

    optimizer._update_scale = update_or_wait
    return grow
