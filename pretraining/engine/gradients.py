"""The gradients of a step under ZeRO 1: added up in fp32, joined over the ranks, measured, clipped; with little work.

DeepSpeed's optimizer for ZeRO 1 in bf16 keeps them in flat fp32 tensors, which `Zero1` leaves as they are: parameters
end to end, cut into a share for each rank. But DeepSpeed casts and adds the gradient of every parameter by itself,
copies all of them to join them at the end, gives every rank all sums, and measures and clips every parameter. In fp32
it takes another optimizer, which copies each gradient several times. Here, in both, they are

    added     a bucket of neighbouring parameters at a time; on a CPU each as it comes, in one pass while it is cached
    joined    bucket by bucket while the last backward pass still runs; a sum goes to the rank whose share it is, alone
    measured  by the norm of each rank's share
    clipped   by a factor that the optimizer's step multiplies with in passing
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from pretraining.engine.clipping import clipping, sum_of_squares
from pretraining.engine.joining import Joining, Share
from pretraining.model import cpu_kernels as kernels

BUCKET_SIZE = 1 << 24
"""Elements of a bucket: enough for a network to run at full speed, few enough that many are under way."""


def stays_on_device(number: Tensor) -> bool:
    """Whether the host would have to wait for a number."""
    return number.is_cuda


class Bucket:
    """Neighbouring parameters, whose gradients are added up and joined together."""

    def __init__(self, sums: Tensor, views: dict[int, Tensor], shares: Sequence[Share]):
        """`sums` is their slice of the flat tensor, and `views` each parameter's part of it by its number.

        The slice with the last parameters goes on to the end of the flat tensor, which is zeros.
        """
        self.sums, self.views, self.shares = sums, views, shares
        self.gathers = sums.device.type != "cpu"
        """whether gradients are kept until all have come: launching a large operation costs no more than a small one"""
        self.kept: dict[int, Tensor] = {}
        self.came: set[int] = set()
        """parameters that have got a gradient in this backward pass"""
        self.summed: set[int] = set()
        """parameters of which `sums` holds a sum of this step; what it holds of others is of an earlier one"""

    def take(self, number: int, gradient: Tensor) -> None:
        """Takes the gradient of a parameter in this backward pass."""
        if number in self.kept:
            self.add_kept()
        self.came.add(number)
        self.kept[number] = gradient.reshape(-1)
        if not self.gathers or self.is_full:
            self.add_kept()

    @property
    def is_full(self) -> bool:
        """Whether all parameters have got a gradient in this backward pass."""
        return len(self.came) == len(self.views)

    def add_kept(self) -> None:
        """Adds the gradients that are kept to the sums, all at once where all are there."""
        alike = len(self.summed) in (0, len(self.views))
        if self.gathers and alike and len(self.kept) == len(self.views):
            together = torch.cat([self.kept[number] for number in self.views])
            _add(together, self.sums[: len(together)], adds=bool(self.summed))
        else:
            for number, gradient in self.kept.items():
                _add(gradient, self.views[number], adds=number in self.summed)
        self.summed.update(self.kept)
        self.kept.clear()

    def end_pass(self) -> None:
        """Ends a backward pass."""
        self.add_kept()
        self.came.clear()

    def complete(self) -> None:
        """Ends the sums of a step: parameters without any gradient have 0."""
        self.add_kept()
        for number in self.views.keys() - self.summed:
            self.views[number].zero_()

    def forget(self) -> None:
        """Begins a step."""
        for known in (self.kept, self.came, self.summed):
            known.clear()


def _add(gradient: Tensor, sums: Tensor, adds: bool) -> None:
    if kernels.usable(gradient):
        kernels.call("add_gradient", gradient, sums, len(sums), int(adds))
    elif adds:
        sums.add_(gradient)
    else:
        sums.copy_(gradient)


def make_buckets(flat: Tensor, sizes: Sequence[int], ranks: int, limit: int) -> Iterator[Bucket]:
    """Cuts a flat tensor of parameters of these sizes into buckets; the last come first, as in a backward pass."""
    ends, share = list(accumulate(sizes)), flat.numel() // ranks
    stop = len(sizes)
    while stop:
        first = stop - 1
        while first and ends[stop - 1] - (ends[first - 1] - sizes[first - 1]) <= limit:
            first -= 1
        begin, end = ends[first] - sizes[first], ends[stop - 1] if stop < len(sizes) else flat.numel()
        views = {number: flat[ends[number] - sizes[number] : ends[number]] for number in range(first, stop)}
        owners = range(begin // share, (end - 1) // share + 1)
        cuts = [(owner, max(begin, owner * share), min(end, (owner + 1) * share)) for owner in owners]
        yield Bucket(flat[begin:end], views, [Share(owner, flat[low:high]) for owner, low, high in cuts])
        stop = first


class Zero1(BF16_Optimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer for ZeRO 1 in bf16, with less work for gradients; it does for fp32 too."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: DeepSpeedEngine):
        super().__init__(
            optimizer,
            engine.param_names,
            SimpleNamespace(enabled=True, immediate_grad_update=True),  # for its section of bf16, in fp32 too
            clip_grad=engine.gradient_clipping(),
            allgather_bucket_size=engine.zero_allgather_bucket_size(),
            dp_process_group=engine.seq_data_parallel_group,
            grad_acc_dtype=torch.float32,
        )
        self.wire: torch.dtype = engine.communication_data_type
        """the type of numbers in which gradients go from rank to rank"""
        self._under_way: list[Joining] = []
        self._sent = 0
        """how many buckets are under way or joined"""
        self._group = self.real_dp_process_group[0]
        self._ranks = dist.get_world_size(self._group)
        found = []
        for group, flat in enumerate(self.fp32_groups_gradients_flat):
            sizes = [parameter.numel() for parameter in self.bf16_groups[group]]
            for bucket in make_buckets(flat, sizes, self._ranks, BUCKET_SIZE):
                found.append((bucket.sums.storage_offset() / flat.numel(), group, bucket))
        found.sort(key=lambda each: -each[0])
        self._buckets = [bucket for *_, bucket in found]
        """all buckets, in about the order in which a backward pass fills them; every rank joins them in this order"""
        self._bucket_of = {(group, number): bucket for _, group, bucket in found for number in bucket.views}

    def accumulate_hp_grads_and_remove_lp(self, parameter: Tensor, group: int, number: int) -> None:
        """Takes a gradient that is ready; DeepSpeed calls it in a backward pass."""
        bucket = self._bucket_of[group, number]
        assert parameter.grad is not None
        bucket.take(number, parameter.grad)
        parameter.grad = None
        if bucket.is_full and self.is_gradient_accumulation_boundary():
            while self._sent < len(self._buckets) and self._buckets[self._sent].is_full:
                self._send_next()

    def update_hp_grads(self, **_: Any) -> None:
        """Adds what a backward pass has left over; DeepSpeed calls it at the end of each."""
        for bucket in self._buckets:
            bucket.end_pass()

    def reduce_gradients(self, **_: Any) -> None:
        """Joins the gradients of all ranks; DeepSpeed calls it after the last backward pass of a step."""
        while self._sent < len(self._buckets):
            self._send_next()
        for joining in self._under_way:
            joining.finish()
        self._under_way.clear()
        self._sent = 0

    def _send_next(self) -> None:
        """Starts to add up the next bucket over all ranks, each part of it where its owner is."""
        bucket = self._buckets[self._sent]
        self._sent += 1
        bucket.complete()
        if self._ranks > 1:
            self._under_way.append(Joining(bucket.sums, bucket.shares, self.wire, self._group))

    @torch.no_grad()
    def step(self) -> None:
        """Moves this rank's share of the weights, and gives it to the others.

        A gradient that is not finite moves nothing on a CPU. On a GPU the host goes on without a look at it: then the
        factor of the gradient is no number. AdamW moves nothing by that; with others, the weights are no numbers either
        until whoever trains has a look, and goes back to a checkpoint.
        """
        norm = self._norm() / self._ranks  # of the mean over ranks, which DeepSpeed's other optimizers make too
        self.overflow = not isinstance(norm, Tensor) and not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm
        if not self.overflow:
            scale = clipping(norm, self.clip_grad) / self._ranks
            self.optimizer.scale = torch.where(norm.isfinite(), scale, math.nan) if isinstance(norm, Tensor) else scale
            for weights, sums in zip(
                self.fp32_groups_flat_partition, self.fp32_groups_gradient_flat_partition, strict=True
            ):
                weights.grad = sums
            self.optimizer.step()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        self.clear_hp_grads()

    def _norm(self) -> Tensor | float:
        """The norm of the sum of all ranks' gradients, over all weights; it stays on a GPU."""
        squares = torch.stack([sum_of_squares(sums) for sums in self.fp32_groups_gradient_flat_partition]).sum()
        if self._ranks > 1:
            dist.all_reduce(squares, group=self._group)
        return squares.sqrt().float() if stays_on_device(squares) else math.sqrt(float(squares))

    def clear_hp_grads(self) -> None:
        """Forgets the gradients, also those of a step that was broken off; the next one overwrites the sums."""
        self._under_way.clear()
        self._sent = 0
        for bucket in self._buckets:
            bucket.forget()


class EngineWithZero1(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine, with `Zero1` in bf16 and fp32 wherever it can be, which tells of its own gradients."""

    on_own_gradients: Callable[[], None] = staticmethod(lambda: None)
    """called at the end of each backward pass; under ZeRO 0 and 1 before this rank waits for the gradients of others"""

    def _backward_epilogue(self) -> None:
        self.on_own_gradients()
        super()._backward_epilogue()

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Zero1:
        return Zero1(optimizer, self)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        fits = self.zero_optimization_stage() == 1 and self.get_data_types()[0] == torch.float32
        if fits and not self.zero_cpu_offload():
            return Zero1(optimizer, self)
        return super()._configure_zero_optimizer(optimizer)
