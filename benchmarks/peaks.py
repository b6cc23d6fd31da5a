"""What a rank holds of weights, gradients and the optimizer's state at the peak of a step, as PyTorch allocates it."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.sides import muffled
from benchmarks.training_sides import Training, joined
from pretraining.config.settings import Dtype, Parallel, Precision
from pretraining.data.batches import full_sequences
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.model.shape import Shape
from pretraining.planning.memory import plan_memory

MARK = 12_347
"""Bytes of a tensor that marks the end of a step among the allocations."""
STEPS = 6
"""Steps of a measurement, of which the first makes the optimizer's state."""


def measure_peak(shape: Shape, dtype: Dtype, zero: int) -> dict[str, Any]:
    """Trains a model for some steps on a few pieces, so that activations are nothing, and compares their peak with what
    is planned.

    All ranks call it together, in processes that have made no engine before: what that left would be freed among what
    is counted. Garbage is collected before each micro-batch, since what refers to itself is freed at any time.
    """
    settings = EngineSettings(precision=Precision(dtype=dtype), parallel=Parallel(zero=zero))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with muffled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        training = Training(shape, settings, torch.device("cpu"), rank=rank)
        for _ in range(STEPS):
            training.step(joined([full_sequences(1, 8, 1)] * 2, ranks), mark=gc.collect)
            torch.empty(MARK, dtype=torch.uint8)
    training.engine.close()
    peak = _lowest_peak(profiled)
    planned = plan_memory(shape, dtype, ranks, zero).device
    return {"dtype": dtype, "zero": zero, "peak": peak, "planned": planned, "error": round(planned / peak - 1, 3)}


def _lowest_peak(profiled: Any) -> int:
    """The most bytes that were allocated at once in a step, of all steps after the first one the lowest.

    What a thread of gloo lets go of is not among the events: under ZeRO 3 weights that were gathered then seem to be
    held for ever. So a peak is counted from what is held between steps, where nothing is gathered, at the fewest.
    """
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    between: list[int] = []
    above: list[int] = []
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += int(event.nbytes())
        peak = max(peak, held)
        if event.nbytes() == MARK:
            above.append(peak - between[-1] if between else peak)
            between.append(held)
            peak = held
    assert len(between) == STEPS, "every step has its mark"
    return min(between) + min(above[1:])
