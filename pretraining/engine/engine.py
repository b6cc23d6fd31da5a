"""An engine trains a model with DeepSpeed: over all ranks, under any ZeRO stage, in any precision."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.common.private_folders import cache_home, keep_compiled
from pretraining.engine.buckets import add_squares, find_clip_factor
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.partition import fill_flat_tensors, find_flat_tensors
from pretraining.engine.precision import choose_dtype
from pretraining.mesh.mesh import form_mesh, is_divided
from pretraining.model.cuda_graphs import RepeatedWork
from pretraining.model.encoder import Trainable
from pretraining.optimizers.steps.flat import FlatOptimizer, build_optimizer

LossScaler = dict[str, float]
"""The state of DeepSpeed's loss scaler, by the names of its attributes."""
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The attributes that decide the scale of the loss; a constant scaler has only the first."""


class CollapseError(Exception):
    """In fp16, gradients overflow at every scale of the loss. All ranks raise it together."""


class Engine:
    """A model in training: forward, backward and the optimizer's step, over all ranks."""

    def __init__(
        self, model: Trainable, settings: EngineSettings, device: torch.device, late_weights: Mapping[str, float] = {}
    ):
        """`late_weights` are those that were added to the model in training, by names: how many steps of the optimizer
        were done before. Bias correction counts theirs from there."""
        self.dtype = choose_dtype(settings.precision.dtype, device)
        self.device = device
        self.zero = settings.zero_stage(self.dtype)
        if settings.parallel.same_bits and self.dtype == torch.float16:
            raise UserError('parallel.same_bits = true: not in fp16, which "auto" takes here; take "fp32"')
        shared = model.shares.mesh.tensor_ranks > 1
        self.shares = model.shares if shared else model.take_shares(form_mesh(settings.parallel.tensor))
        self.mesh, self._clip = self.shares.mesh, settings.optimizer.clip
        self._whole_norm: Tensor | None = None
        """The norm of the last gradient without ZeRO; with ZeRO, DeepSpeed has it."""
        keep_compiled("TORCH_EXTENSIONS_DIR", cache_home() / "torch_extensions")  # operations of DeepSpeed's
        self.late_weights = dict(late_weights)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        is_rounded = self.dtype != torch.float32
        exact = {name: weight.detach().clone() for name, weight in model.named_parameters() if is_rounded}
        self.optimizer: FlatOptimizer = build_optimizer(model, model.roles(), settings.optimizer, self.late_weights)
        self.optimizer.same_bits = self.same_bits = settings.parallel.same_bits
        self.shares.mark(model.to(device))
        with silence_deepspeed():
            from pretraining.engine.deepspeed_parts import initialize_deepspeed, let_scale_grow_after_step

            parts = model, self.optimizer, settings, self.dtype, device, self.mesh
            self.deepspeed: Any = initialize_deepspeed(*parts)
        self.model: Trainable = self.deepspeed.module
        self.flat_tensors = find_flat_tensors(self.deepspeed, self.model)
        fill_flat_tensors(self.flat_tensors, exact)  # DeepSpeed makes them from weights that it has rounded to 16 bits
        if settings.compute.graphs == "auto" and self.zero < 2 and self.dtype != torch.float16:
            self.optimizer.graph = RepeatedWork("steps of the optimizer take longer")
        self.optimizer.prepare(self.flat_tensors, model.roles(), shapes, self.shares)
        if settings.parallel.offload == "none":  # a host may be slow in 16 bits
            self.optimizer.dtype = self.dtype
        is_scaled = self.dtype == torch.float16
        self._after_step = let_scale_grow_after_step(self.deepspeed.optimizer) if is_scaled else lambda: None

    def forward(self, batch: Any) -> Any:
        """Computes the output of the model for a micro-batch of this rank."""
        return self.deepspeed(batch)

    def backward(self, loss: Tensor, last: bool, mark: Callable[[], None] = lambda: None) -> None:
        """Adds to the gradients; the `last` micro-batch of a step adds those of the other ranks. `mark` is called when
        this rank's own gradients are complete; under ZeRO 2 and 3 it has waited for others before.

        The sum of `loss` over data ranks and micro-batches is minimised: DeepSpeed's mean over these is undone, where
        it takes one.
        """
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.on_own_gradients = mark
        averages = self.mesh.data_ranks > 1 and not getattr(self.deepspeed.optimizer, "takes_sums", False)
        whole = loss * self.mesh.data_ranks if averages else loss
        self.deepspeed.backward(whole, scale_wrt_gas=False)

    def expect(self, gradients: int) -> float:
        """Takes the number of micro-batches of the next step, over all ranks; returns the largest gradient that sums
        can take. For `same_bits` alone."""
        self.deepspeed.optimizer.limit.addends = gradients
        return float(self.deepspeed.optimizer.limit.largest)

    def join_gradients(self, mark: Callable[[], None]) -> None:
        """Adds the gradients of other ranks where this one has no last micro-batch. For `same_bits` alone."""
        self.deepspeed.set_gradient_accumulation_boundary(True)
        mark()
        self.deepspeed.allreduce_gradients()

    def step(self, learning_rate: float) -> None:
        """Moves the weights, with this learning rate, and forgets the gradients."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.zero == 0:  # DeepSpeed would clip without returning the norm
            counted = self.model.parameters() if self.mesh.counts else filter(is_divided, self.model.parameters())
            found = [add_squares(weight.grad.flatten()) for weight in counted if weight.grad is not None]
            self._whole_norm = self.mesh.reduce(torch.stack(found).sum()).sqrt().float()
            self.optimizer.scale = find_clip_factor(self._whole_norm, self._clip)
        try:
            self.deepspeed.step()
        except Exception as error:
            if "scale already at minimum" in str(error):
                raise CollapseError from error
            raise
        self._after_step()

    def forget_gradients(self) -> None:
        """Forgets the gradients of a step that was broken off."""
        self.deepspeed.optimizer.zero_grad()

    def close(self) -> None:
        """Frees its memory, so that another engine can follow in the same process."""
        self.deepspeed.destroy()

    @property
    def gradient_norm(self) -> Tensor | float | None:
        """The norm of the last step's gradient, before clipping, already there within the step. If it is not finite,
        the step has moved nothing."""
        norm: Tensor | float | None = self.deepspeed.optimizer._global_grad_norm if self.zero else self._whole_norm
        return norm

    @property
    def optimizer_steps(self) -> float:
        """The number of steps that have moved the weights: in fp16 some do not."""
        return max(float(self.optimizer.get_state(flat.tensor)["step"]) for flat in self.flat_tensors)

    @optimizer_steps.setter
    def optimizer_steps(self, count: float) -> None:
        for flat in self.flat_tensors:
            before = max((self.late_weights.get(name, 0.0) for name in flat.sizes), default=0.0)  # all have the same
            self.optimizer.get_state(flat.tensor)["step"].fill_(count - before)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The state of the loss scaler in fp16; None in other precisions."""
        if self.dtype != torch.float16:
            return None
        has = vars(self.deepspeed.optimizer.loss_scaler)
        return {name: has[name] for name in SCALER_STATE if name in has}

    @loss_scaler.setter
    def loss_scaler(self, values: LossScaler | None) -> None:
        if self.dtype == torch.float16 and values is not None:
            vars(self.deepspeed.optimizer.loss_scaler).update(values)

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in fp16; None in other precisions."""
        return float(self.deepspeed.optimizer.loss_scale) if self.dtype == torch.float16 else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter in full, in fp32 on the host; all ranks must iterate over it."""
        for name, parameter in self.model.named_parameters():
            yield name, self._gather_weight(name, parameter)

    def _gather_weight(self, name: str, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        divided = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
        full = safe_get_full_fp32_param(parameter) if divided or self.dtype != torch.float32 else parameter.detach()
        return self.shares.join(name, full.to("cpu", torch.float32))

    @torch.no_grad()
    def change_weight(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces a weight by the result of `change`, which takes the whole weight and must be the same on all ranks;
        all ranks call it."""
        from deepspeed.runtime.zero import GatheredParameters

        parameter = self.model.get_parameter(name)
        full = self.shares.take(name, change(self._gather_weight(name, parameter)))
        with GatheredParameters([parameter], modifier_rank=0, enabled=self.zero == 3):
            if parameter.numel():
                parameter.copy_(full)
        fill_flat_tensors(self.flat_tensors, {name: full})


@contextlib.contextmanager
def silence_deepspeed() -> Iterator[None]:
    """Silences DeepSpeed, which logs and prints its every step, and torch, which warns that its barrier takes the GPU
    that this rank has chosen."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
        yield


SHORTAGE = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Messages of CUDA, its libraries and a CPU for a lack of memory, where torch has no error class of its own."""


def is_shortage(error: RuntimeError) -> bool:
    """Whether the error is a lack of memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in SHORTAGE)
