"""ZeRO 1 with fewer passes over the gradients than in DeepSpeed.

DeepSpeed's optimizer for ZeRO 1 in bf16 has flat fp32 tensors of gradients: parameters end to end, cut into a share for
each rank. `Zero1` keeps this layout. But DeepSpeed casts and adds the gradient of every parameter by itself, copies all
of them for the exchange at the end, gives every rank all sums, and measures and clips every parameter. In fp32 it takes
another optimizer, which copies each gradient several times. Here, for both types, gradients are

    added     a bucket of neighbouring parameters at a time; on a CPU each at once, while it is cached
    exchanged between the ranks, so that only the owner of a share gets its sums (`exchange.py`)
    measured  by the norm of each rank's share
    clipped   by a factor, which the optimizer's step multiplies with
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import all_gather_dp_groups
from torch import Tensor

from pretraining.engine.buckets import Bucket, add_squares, find_clip_factor, make_buckets
from pretraining.engine.exchange import Exchange, Network
from pretraining.engine.neighbours import find_neighbours
from pretraining.mesh.mesh import is_divided
from pretraining.model.fused import TAKES_ROWS
from pretraining.optimizers.steps.flat import FlatOptimizer
from pretraining.processes.group import wait_for_all

BUCKET_SIZE = 1 << 24
"""The elements of a bucket: enough for a network to run at full speed, few enough that many buckets are under way."""


def stays_on_device(number: Tensor) -> bool:
    """Whether a number stays on a GPU, so that the host need not wait for it."""
    return number.is_cuda


def choose_exchange(
    parameters: Sequence[Tensor], wire: torch.dtype, shared: bool = False, padding: int = 0
) -> Exchange:
    """Chooses how ranks exchange gradients of the type `wire`: in memory if all are on one machine, and have a whole
    model each, which is not `shared`. Flat tensors have `padding` numbers besides those of the parameters.

    On CPUs it also lets embedding tables have sparse gradients. All ranks must call it.
    """
    if any(parameter.device.type != "cpu" for parameter in parameters):
        return Network(wire)
    for parameter in parameters:
        setattr(parameter, TAKES_ROWS, True)
    if shared or wire not in (torch.float32, torch.int64):
        return Network(wire)
    return find_neighbours(parameters, BUCKET_SIZE, wire, padding) or Network(wire)


class Zero1(BF16_Optimizer):  # type: ignore[misc]
    """DeepSpeed's optimizer for ZeRO 1 in bf16, with less work for gradients; also for fp32."""

    def __init__(self, optimizer: FlatOptimizer, engine: DeepSpeedEngine):
        parameters = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        self._shared = engine.mpu is not None
        self._exchange = self.choose_exchange(parameters, engine.communication_data_type)
        """exchanges gradients and weights between ranks"""
        super().__init__(
            optimizer,
            engine.param_names,
            SimpleNamespace(enabled=True, immediate_grad_update=True),  # for its section of bf16, in fp32 too
            clip_grad=engine.gradient_clipping(),
            allgather_bucket_size=engine.zero_allgather_bucket_size(),
            dp_process_group=engine.seq_data_parallel_group,
            grad_acc_dtype=torch.float32,
        )
        self._group = self.real_dp_process_group[0]
        self._ranks = dist.get_world_size(self._group)
        self.asks_ranks = self._ranks > 1 or self._shared
        """whether the norm needs numbers of others"""
        self.own_gradients: Sequence[Tensor] = self.fp32_groups_gradient_flat_partition
        """this rank's share of the sums over all ranks, in fp32"""
        self._squares: Tensor | None = None
        """the squares of all ranks' gradients, in memory that a graph reads; None where a step adds them up itself"""
        self._exchange.prepare(self.fp32_groups_gradients_flat, self._group, BUCKET_SIZE)
        for shares, own in zip(self.bf16_partitioned_groups, self.fp32_groups_flat_partition, strict=True):
            optimizer.rounded[id(own)] = shares[dist.get_rank(self._group)]
        found = []
        for group, flat in enumerate(self.fp32_groups_gradients_flat):
            shapes = [parameter.shape for parameter in self.bf16_groups[group]]
            cut = flat, shapes, self._ranks, BUCKET_SIZE, self.list_offsets(group), self.make_bucket
            for bucket in make_buckets(*cut):
                found.append((bucket.sums.storage_offset() / flat.numel(), group, bucket))
        found.sort(key=lambda each: -each[0])
        self._buckets = [bucket for *_, bucket in found]
        """all buckets, in about the order in which a backward pass fills them; every rank exchanges them in this
        order"""
        if self._shared and engine.mpu.get_model_parallel_rank():
            for _, group, bucket in found:
                own = {number for number in bucket.views if is_divided(self.bf16_groups[group][number])}
                bucket.uncounted = bucket.views.keys() - own
        self._bucket_of = {(group, number): bucket for _, group, bucket in found for number in bucket.views}

    takes_sums = True
    """whether it moves weights by the sum of the ranks' gradients: DeepSpeed's other optimizers take the mean"""
    make_bucket: Callable[..., Bucket] = Bucket

    def choose_exchange(self, parameters: Sequence[Tensor], wire: torch.dtype) -> Exchange:
        """Chooses how ranks exchange gradients, of the type `wire` where sums are in fp32."""
        return choose_exchange(parameters, wire, self._shared)

    def list_offsets(self, group: int) -> Sequence[int]:
        """Lists the first number of each parameter in a flat tensor."""
        return [0, *accumulate(parameter.numel() for parameter in self.bf16_groups[group])][:-1]

    def _flatten_dense_tensors_aligned(self, tensors: Sequence[Tensor], alignment: int) -> Tensor:
        """Lays weights end to end; DeepSpeed calls it before parameters become views of them."""
        return self._exchange.place(super()._flatten_dense_tensors_aligned(tensors, alignment))

    def accumulate_hp_grads_and_remove_lp(self, parameter: Tensor, group: int, number: int) -> None:
        """Takes a gradient that is ready; DeepSpeed calls it in a backward pass."""
        bucket = self._bucket_of[group, number]
        assert parameter.grad is not None
        is_full = bucket.take(number, parameter.grad)
        parameter.grad = None
        if is_full and self.is_gradient_accumulation_boundary():
            self._exchange.join_full(self._buckets)

    def update_hp_grads(self, **_: Any) -> None:
        """Adds the remaining gradients; DeepSpeed calls it at the end of each backward pass."""
        for bucket in self._buckets:
            bucket.end_pass()

    def reduce_gradients(self, **_: Any) -> None:
        """Exchanges the gradients of all ranks; DeepSpeed calls it after the last backward pass of a step."""
        self._exchange.join(self._buckets)

    @torch.no_grad()
    def step(self) -> None:
        """Moves this rank's share of the weights, and sends it to the others.

        A gradient that is not finite moves nothing. On a GPU the host does not look at the norm: the factor of the
        gradient is then NaN, and the optimizer's step leaves everything as it is.
        """
        on_device = stays_on_device(self.fp32_groups_flat_partition[0])
        if not on_device:
            self.optimizer.scale = self._find_scale()
        elif self.asks_ranks:  # a graph waits for no other rank
            squares = self._add_squares()
            self._squares = squares if self._squares is None else self._squares.copy_(squares)
        self.optimizer.find_scale = self._find_scale if on_device else None
        self.overflow = not on_device and not math.isfinite(self._norm)
        if not self.overflow:
            for weights, sums in zip(self.fp32_groups_flat_partition, self.own_gradients, strict=True):
                weights.grad = sums
            self.optimizer.step()
            if not self.optimizer.keeps_zeros:
                for bucket in self._buckets:
                    bucket.rows.clear()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        norm = self._norm  # a graph writes the next one there
        self._global_grad_norm = norm.clone() if isinstance(norm, Tensor) else norm
        self.clear_hp_grads()

    def update_lp_params(self) -> None:
        """Sends this rank's share of the rounded weights to the others unless they share its memory."""
        if self._exchange.shares_weights:
            wait_for_all()
        elif self._ranks > 1:
            all_gather_dp_groups(
                groups_flat=self.bf16_groups_flat,
                partitioned_param_groups=self.bf16_partitioned_groups,
                dp_process_group=self.real_dp_process_group,
                start_alignment_factor=self.nccl_start_alignment_factor,
                allgather_bucket_size=self.allgather_bucket_size,
            )

    def _find_scale(self) -> Tensor | float:
        """Computes the factor of gradients, and their norm."""
        squares = self._add_squares() if self._squares is None else self._squares
        norm = self._norm = squares.sqrt().float() if stays_on_device(squares) else math.sqrt(float(squares))
        return find_clip_factor(norm, self.clip_grad)

    def _add_squares(self) -> Tensor:
        """Adds up the squares of the sum of all ranks' gradients, over all weights."""
        if any(bucket.rows or bucket.uncounted for bucket in self._buckets):
            rank = dist.get_rank(self._group)
            own = [(bucket, share) for bucket in self._buckets for share in bucket.shares if share.owner == rank]
            squares = torch.stack([bucket.squares(share) for bucket, share in own]).sum()
        else:
            squares = torch.stack([add_squares(sums) for sums in self.fp32_groups_gradient_flat_partition]).sum()
        if self.asks_ranks:
            dist.all_reduce(squares, group=None if self._shared else self._group)
        return squares

    def clear_hp_grads(self) -> None:
        """Forgets the gradients, also those of a step that was broken off; the next step overwrites the sums."""
        self._exchange.break_off()
        for bucket in self._buckets:
            bucket.forget()
