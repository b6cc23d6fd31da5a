"""The planned memory of weights, gradients and the optimizer, against the peaks of PyTorch's allocator on CPU ranks."""

import gc
import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.marks import slow
from support.processes import spawn
from support.training import connect_ranks
from torch.profiler import ProfilerActivity, profile

from benchmarks.training_sides import Training, join_micro_batches
from pretraining.architectures.declaration import make_shape
from pretraining.config.settings import Dtype, Parallel, Precision
from pretraining.data.batches import full_sequences
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.model.shape import Shape
from pretraining.planning.memory import plan_memory
from pretraining.processes.group import disconnect

VOCABULARY = 30522
ALLOWED = 0.1
MARK = 12_347
"""Bytes of a tensor that marks the end of a step among the allocations."""
PEAK_STEPS = 4
"""Steps of a measurement, of which the first makes the optimizer's state."""


MINI, BASE = (make_shape(size, VOCABULARY) for size in ("mini", "base"))
SHAPES = {"mini": MINI, "third of base": replace(MINI, layers=BASE.layers, vocabulary=VOCABULARY // 3)}
"""Most weights of mini are word embeddings, and most of the third of base are layers, in the proportions of base, which
itself takes 8 GB a rank under ZeRO 3."""


def measure(size: str, zero: int) -> dict[str, Any]:
    """What one rank finds."""
    connect_ranks()
    found = measure_peak(SHAPES[size], "bf16", zero)
    disconnect()
    return found


def measure_peak(shape: Shape, dtype: Dtype, zero: int) -> dict[str, Any]:
    """Trains a model for some steps on a few pieces, so that activations are nothing, and compares their peak with what
    is planned.

    All ranks call it together, in processes that have made no engine before: what that left would be freed among what
    is counted. Garbage is collected before each micro-batch, since what refers to itself is freed at any time.
    """
    settings = EngineSettings(precision=Precision(dtype=dtype), parallel=Parallel(zero=zero))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says nothing on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with patch("pretraining.engine.gradients.find_neighbours", return_value=None):  # as GPUs, which share no memory
            training = Training(shape, settings, torch.device("cpu"), rank=rank)
        for _ in range(PEAK_STEPS):
            training.step(join_micro_batches([full_sequences(1, 8, 1)] * 2, ranks), mark=gc.collect)
            torch.empty(MARK, dtype=torch.uint8)
    training.engine.close()
    peak = lowest_peak(profiled)
    planned = plan_memory(shape, dtype, ranks, zero).device
    return {"dtype": dtype, "zero": zero, "peak": peak, "planned": planned, "error": round(planned / peak - 1, 3)}


def lowest_peak(profiled: Any) -> int:
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
    assert len(between) == PEAK_STEPS, "every step has its mark"
    return min(between) + min(above[1:])


@pytest.mark.parametrize(("size", "zero"), [slow(size, zero) for size in SHAPES for zero in range(4)])
def test_memory_is_planned_as_it_is_allocated(size: str, zero: int) -> None:
    """Frees that the profiler misses can only make a peak look larger: of ranks and tries the lowest counts, and it is
    tried again only where that is too high."""
    found: list[dict[str, Any]] = []
    for _ in range(3 if zero == 3 else 1):
        for rank in spawn(2, measure, size, zero, timeout=300):
            assert rank.code == 0, rank.ending
            found.append(rank.result)
        lowest = min(found, key=lambda each: int(each["peak"]))
        if abs(lowest["error"]) <= ALLOWED:
            return
    pytest.fail(f"{size}: {found}")
