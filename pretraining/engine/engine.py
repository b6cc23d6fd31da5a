"""DeepSpeed, set up from a recipe: who owns which share of weights, gradients and optimizer, and in which numbers."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from pretraining.config.settings import Recipe
from pretraining.engine.adamw import AdamW
from pretraining.engine.apex import find_apex
from pretraining.engine.lamb import Lamb
from pretraining.engine.optimizers import build_optimizer
from pretraining.engine.partition import fill_flat_tensors, find_flat_tensors
from pretraining.engine.precision import choose_dtype
from pretraining.model.bert import Bert, Losses

NEVER = 1 << 40
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""what DeepSpeed's scale of the loss depends on"""


class CollapseError(Exception):
    """In fp16, gradients overflow whatever the scale of the loss is. All ranks find it at once."""


def deepspeed_config(recipe: Recipe, dtype: torch.dtype, device: torch.device, ranks: int) -> dict[str, Any]:
    """What DeepSpeed is told. Its batch sizes are for its own books: the trainer says where a step ends."""
    parallel, precision = recipe.parallel, recipe.precision
    stage = parallel.zero
    if stage == 0 and dtype != torch.float32:
        stage = 1  # without ZeRO, DeepSpeed adds up gradients in 16 bits; stage 1 computes the same in fp32
    clip = 0.0 if recipe.optimizer.normalize else recipe.optimizer.clip
    zero: dict[str, Any] = {"stage": stage}
    if device.type == "cpu":
        zero["overlap_comm"] = False
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if parallel.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if parallel.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip if stage else 0.0,  # without ZeRO, Engine.step clips
        "steps_per_print": NEVER,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # gradients meet in it too, so that the number of ranks does not matter
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": True}
    if dtype == torch.float16:
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": precision.loss_scale_power,
            "loss_scale_window": precision.loss_scale_window,
            "min_loss_scale": precision.loss_scale_min,
        }
    return merged(config, recipe.deepspeed)


def merged(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`config` with the recipe's own settings of DeepSpeed added, table by table."""
    result = dict(config)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


class Engine:
    """A model in training: forward, backward and the optimizer's step, over all ranks."""

    _grow_scale: Callable[[], None] = staticmethod(lambda: None)
    """in fp16, what is left to do after a step"""
    _grows = False

    def __init__(self, model: Bert, recipe: Recipe, device: torch.device, ranks: int):
        self.dtype = choose_dtype(recipe.precision.dtype, device)
        self.device = device
        self._ranks = ranks
        config = deepspeed_config(recipe, self.dtype, device, ranks)
        if recipe.compute.compile:
            for layer in model.layers:
                layer.compile()
        optimizer = build_optimizer(model, recipe.optimizer)
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with quiet():
            import deepspeed

            deepspeed.utils.logger.setLevel(logging.ERROR)
            # It would try its compilers, and compile an operation between CPUs that only inference calls.
            deepspeed.ops.__compatible_ops__ = {}
            self.deepspeed, _, _, _ = deepspeed.initialize(
                args=SimpleNamespace(device_rank=device.index or 0),  # a rank that sees its own GPU alone calls it 0
                model=model.to(device),
                optimizer=optimizer,
                config=config,
                dist_init_required=False,
            )
        self.model: Bert = self.deepspeed.module
        self.zero: int = config["zero_optimization"]["stage"]
        self.flat_tensors = find_flat_tensors(self.deepspeed, self.model)
        fill_flat_tensors(self.flat_tensors, exact)  # DeepSpeed makes them of weights that it has rounded to 16 bits
        self.optimizer: AdamW = optimizer
        if isinstance(optimizer, Lamb):
            find_apex(recipe.optimizer.kernels, device)  # says what is missing, before there is anything to lose
            optimizer.divide(self.flat_tensors, Bert.fused)
            # the engine's own figure comes after the step
            optimizer.gradient_norm = lambda: self.deepspeed.optimizer._global_grad_norm if self.zero else self._norm
        self._clip = 0.0 if recipe.optimizer.normalize else recipe.optimizer.clip
        self._norm: Tensor | None = None  # without ZeRO
        if self.dtype == torch.float16:
            self._put_off_growth()

    def forward(self, batch: Any) -> Losses:
        """The sums of this rank's micro-batch."""
        return self.deepspeed(batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds to the gradients; the `last` micro-batch of a step joins them with those of the other ranks.

        The sum of `loss` over ranks and micro-batches is what is minimised: DeepSpeed's mean over ranks is undone.
        """
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self._ranks, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> None:
        """Moves the weights, at this learning rate, and forgets the gradients."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.zero == 0:  # DeepSpeed would clip there without telling the norm
            self._norm = clip_grad_norm_(self.model.parameters(), self._clip or math.inf)
        try:
            self.deepspeed.step()
        except Exception as error:
            if "scale already at minimum" in str(error):
                raise CollapseError from error
            raise
        self._grow_scale()

    def _put_off_growth(self) -> None:
        """The loss scale grows after a step: DeepSpeed lets it grow within, and divides by the new one what the old
        one multiplied, which halves the gradient of that step."""
        optimizer = self.deepspeed.optimizer
        update = optimizer._update_scale

        def update_or_wait(has_overflow: bool = False) -> None:
            if has_overflow:
                update(has_overflow)
            self._grows = not has_overflow

        def grow() -> None:
            if self._grows:
                update(False)

        optimizer._update_scale, self._grow_scale = update_or_wait, grow

    def close(self) -> None:
        """Lets go of its memory, so that another can follow in the same process."""
        self.deepspeed.destroy()

    @property
    def gradient_norm(self) -> Tensor | float | None:
        """Of the last step, before clipping. Where it is not finite, ZeRO has left the step out."""
        norm: Tensor | float | None = self.deepspeed.get_global_grad_norm() if self.zero else self._norm
        return norm

    @property
    def optimizer_steps(self) -> float:
        """Those that moved the weights: in fp16 some do not."""
        return max(float(self.optimizer.state_of(share.tensor)["step"]) for share in self.flat_tensors)

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        """What decides the scale of the loss in fp16."""
        if self.dtype != torch.float16:
            return None
        scaler = self.deepspeed.optimizer.loss_scaler
        return {name: getattr(scaler, name) for name in SCALER if hasattr(scaler, name)}

    @loss_scaler.setter
    def loss_scaler(self, values: dict[str, Any] | None) -> None:
        if self.dtype == torch.float16 and values is not None:
            for name, value in values.items():
                setattr(self.deepspeed.optimizer.loss_scaler, name, value)

    @property
    def loss_scale(self) -> float | None:
        """In fp16."""
        return float(self.deepspeed.optimizer.loss_scale) if self.dtype == torch.float16 else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, in fp32 on the host, one after another; all ranks must go through it."""
        for name, parameter in self.model.named_parameters():
            yield name, self._full(parameter)

    def _full(self, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        divided = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
        full = safe_get_full_fp32_param(parameter) if divided or self.dtype != torch.float32 else parameter.detach()
        return full.to("cpu", torch.float32)

    @torch.no_grad()
    def change_weight(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Puts another value in a weight's place; all ranks call it, and `change` gives them the same."""
        from deepspeed.runtime.zero import GatheredParameters

        parameter = self.model.get_parameter(name)
        full = change(self._full(parameter))
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero == 3):
            if parameter.numel():
                parameter.copy_(full)
        fill_flat_tensors(self.flat_tensors, {name: full})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed tells of its every step otherwise, by logging and by printing."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
