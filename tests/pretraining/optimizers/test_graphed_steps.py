"""The optimizer's step by a CUDA graph, which repeats its kernels at the same addresses and with the same numbers.

Where there is no GPU, the work is done again in place of a replay, and what it hands to kernels is compared from step
to step: a learning rate that Python knew when the graph was captured would be that of all later steps.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.operations import compute_by
from support.optimizer_reference import Pull, make_engine
from support.training import run_connected
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from data_prep.common.launchers import World
from pretraining.engine import gradients
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model import cuda_graphs
from pretraining.model.batch import StepBatches
from pretraining.model.cuda_graphs import RepeatedWork
from pretraining.optimizers.steps import adamw, flat
from pretraining.optimizers.steps.flat import FlatOptimizer
from pretraining.processes.group import connect, disconnect

RATES = [1e-3, 2e-3, 5e-3, 1e-4, 0.0, 3e-3]
SKIPPED = 3
"""The step whose gradient is not finite."""
CASES = [*product(("adamw", "lamb", "muon"), (0, 1))]
Log = list[Any]


def make_steps(engine: Engine) -> list[Tensor]:
    """Makes a step for each of RATES; returns the weights after each, one below the other."""
    kept = []
    for step, rate in enumerate(RATES):
        poison, micro = math.nan if step == SKIPPED else 1.0, (Pull(step, 0), Pull(step, 1))
        train_step(engine, StepBatches(micro, 2), rate, Seeds(0, 0), lambda pulled, _, by=poison: pulled * by)
        kept.append(torch.cat([weight.flatten() for _, weight in engine.weights()]))
    return kept


class Recorder(TorchDispatchMode):
    """Records what operations are given: numbers, and the addresses of tensors that they have not made themselves."""

    def __init__(self, log: Log, known: set[int]) -> None:
        """`known`: the addresses of tensors whose elements may change from step to step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.log, self.known, self.made = log, known, set[int]()

    def describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        alike, at = (tuple(value.shape), value.stride(), value.dtype), value.untyped_storage().data_ptr()
        if at in self.made:
            return alike
        return (*alike, value.data_ptr(), None if value.dim() or value.data_ptr() in self.known else value.tolist())

    def note(self, operation: str, given: Any) -> None:
        self.log.append((operation, tree_map(self.describe, tree_leaves(given))))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(str(operation), (args, kwargs))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = operation(*args, **(kwargs or {}))
        made = {each.untyped_storage().data_ptr() for each in tree_leaves(found) if isinstance(each, Tensor)}
        self.made |= made - given
        return found


class NotedKernel:
    """A kernel in Triton whose launches are recorded."""

    def __init__(self, kernel: Any, recorders: list[Recorder]) -> None:
        self.kernel, self.recorders = kernel, recorders

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            for recorder in self.recorders:
                recorder.note(self.kernel.fn.__name__, (grid, args, options))
            with torch.utils._python_dispatch._disable_current_modes():
                self.kernel[grid](*args, **options)

        return launch


def record_replays(optimizer: Any, logs: list[Log], recorders: list[Recorder], patch: pytest.MonkeyPatch) -> None:
    """Puts the work itself in the place of a replay, and records it."""

    def capture(work: Callable[[], None]) -> tuple[Callable[[], None], None]:
        def replay() -> None:
            states = [*chain_states(optimizer)]
            logs.append([])
            recorders[:] = [Recorder(logs[-1], {each.data_ptr() for each in (*states, *optimizer._numbers)})]
            with recorders[0]:
                work()
            recorders.clear()

        return replay, None

    patch.setattr(cuda_graphs, "capture", capture)


def chain_states(optimizer: FlatOptimizer) -> Iterator[Tensor]:
    for each in optimizer.flats.values():
        yield from optimizer.get_state(each.tensor).values()


def step_by_stand_in(name: str, zero: int, fault: Callable[[pytest.MonkeyPatch], None]) -> tuple[list[Log], list[bool]]:
    """What each replay hands to kernels, and whether weights are those of kernel by kernel after each step."""
    logs: list[Log] = []
    recorders: list[Recorder] = []
    with compute_by("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "stays_on_device", lambda _: True)
        patch.setattr(flat, "takes_tensors", lambda _: True)
        if name == "lamb":
            from pretraining.model import gpu_lamb

            for kernel in ("_update", "_add", "_move"):
                patch.setattr(gpu_lamb, kernel, NotedKernel(getattr(gpu_lamb, kernel), recorders))
        engine = make_engine("fp32", zero, {"name": name, "clip": 0.5})
        engine.optimizer.graph = None
        wanted = make_steps(engine)
        engine = make_engine("fp32", zero, {"name": name, "clip": 0.5})
        record_replays(engine.optimizer, logs, recorders, patch)
        fault(patch)
        found = make_steps(engine)
    return logs, [*map(torch.equal, wanted, found)]


def do_nothing(_: pytest.MonkeyPatch) -> None:
    pass


def step_in_all_ways() -> dict[Any, Any]:
    return {case: step_by_stand_in(*case, do_nothing) for case in CASES}


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    pytest.importorskip("triton", reason="Triton is not installed")
    [result] = run_connected(1, step_in_all_ways, timeout=300)
    return dict(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_are_given_the_same_at_each_step(found: dict[Any, Any], case: tuple[str, int]) -> None:
    """The learning rate and the factor of gradients change, and one step is skipped."""
    logs, same = found[case]
    assert len(logs) == len(RATES) - 1
    assert len(logs[0]) > 3
    for log in logs[1:]:
        assert log == logs[0]
    assert same == [True] * len(RATES)
