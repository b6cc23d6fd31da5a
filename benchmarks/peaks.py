"""What a rank holds of weights, gradients and the optimizer's state at the peak of a step, as PyTorch allocates it."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from pretraining.config.settings import Dtype, Parallel, Precision
from pretraining.data.batches import full_sequences
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.precision import set_arithmetic
from pretraining.engine.step import Seeds, train_step
from pretraining.model.batch import PretrainingBatches
from pretraining.model.bert import Bert, pretraining_loss
from pretraining.model.shape import Shape
from pretraining.planning.memory import plan_memory

CPU = torch.device("cpu")
MARK = 12_347
"""Bytes of a tensor that marks the end of a step among the allocations."""
STEPS = 3
"""The first one makes the optimizer's state."""


def measure_peak(shape: Shape, dtype: Dtype, zero: int) -> dict[str, Any]:
    """Trains a model for some steps on a few pieces, so that activations are nothing, and compares the last one's peak
    with what is planned. All ranks call it together."""
    settings = EngineSettings(precision=Precision(dtype=dtype), parallel=Parallel(zero=zero))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    gc.collect()  # what an engine before has left would be freed among what is counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        set_arithmetic(settings.precision, settings.compute, CPU)
        engine = Engine(Bert(shape).initialize(0), settings, CPU)
        batch = full_sequences(1, 8, 1)
        for step in range(STEPS):
            batches = PretrainingBatches((batch, batch), 2 * ranks, 2 * ranks)
            train_step(engine, batches, 1e-5, Seeds.of(0, step, rank), pretraining_loss)
            torch.empty(MARK, dtype=torch.uint8)
    engine.close()
    peak = _last_peak(profiled)
    planned = plan_memory(shape, dtype, ranks, zero).device
    return {"dtype": dtype, "zero": zero, "peak": peak, "planned": planned, "error": round(planned / peak - 1, 3)}


def _last_peak(profiled: Any) -> int:
    """The most bytes that were allocated at once in the last step."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peaks = 0, [0]
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        peaks[-1] = max(peaks[-1], held)
        if event.nbytes() == MARK:
            peaks.append(0)
    assert len(peaks) == STEPS + 1, "every step has its mark"
    return peaks[-2]
