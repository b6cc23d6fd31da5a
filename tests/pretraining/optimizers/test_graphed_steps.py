"""The optimizer's step by a CUDA graph, which repeats its kernels at the same addresses and with the same numbers.

Where there is no GPU, the work is done again in place of a replay, and what it hands to kernels is compared from step
to step: a learning rate that Python knew at the capture would be that of all later steps.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.operations import compute_by
from support.optimizer_reference import Pull, make_engine
from support.training import run_connected
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_prep.common.launchers import World
from pretraining.engine import gradients
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model import cuda_graphs, gpu_operations
from pretraining.model.batch import StepBatches
from pretraining.model.cuda_graphs import RepeatedWork
from pretraining.optimizers.adamw import OPTIMIZER as ADAMW
from pretraining.optimizers.declaration import OptimizerSettings
from pretraining.optimizers.steps import flat
from pretraining.optimizers.steps.adamw import AdamW
from pretraining.optimizers.steps.flat import FlatOptimizer
from pretraining.processes.group import connect, disconnect

RATES = [1e-3, 2e-3, 5e-3, 1e-4, 0.0, 3e-3]
SKIPPED = 3
"""The step whose gradient is not finite."""
CASES = [*product(("adamw", "lamb", "lamb in Triton", "muon"), (0, 1))]
Log = list[Any]


def scale_loss(factor: float, pulled: Tensor, _: Any) -> Tensor:
    return pulled * factor


def make_steps(engine: Engine) -> list[Tensor]:
    """Makes a step for each of RATES; returns the weights after each, end to end."""
    kept = []
    for step, rate in enumerate(RATES):
        micro: Any = (Pull(step, 0), Pull(step, 1))
        batches, factor = StepBatches(micro, 2), math.nan if step == SKIPPED else 1.0
        train_step(engine, batches, rate, Seeds(0, 0), partial(scale_loss, factor))
        kept.append(torch.cat([weight.flatten() for _, weight in engine.weights()]))
    return kept


def address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records what operations are given: numbers, and the addresses of tensors that they have not made themselves."""

    def __init__(self, log: Log, known: set[int]) -> None:
        """`known`: the addresses of single numbers that change from step to step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.log, self.known, self.made = log, known, set[int]()

    def describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        form = (tuple(value.shape), value.stride(), value.dtype)
        if address(value) in self.made:
            return form
        return (*form, value.data_ptr(), None if value.dim() or value.data_ptr() in self.known else value.item())

    def note(self, operation: str, given: Any) -> None:
        self.log.append((operation, [self.describe(each) for each in tree_leaves(given)]))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(str(operation), (args, kwargs))
        found = operation(*args, **(kwargs or {}))
        given, made = (
            [each for each in tree_leaves(all) if isinstance(each, Tensor)] for all in ((args, kwargs), found)
        )
        self.made |= {*map(address, made)} - {*map(address, given)}
        return found


class NotedKernel:
    """Stands for a kernel in Triton: its launches are recorded, and do nothing, since Triton's interpreter is slow."""

    def __init__(self, name: str, recorders: list[Recorder]) -> None:
        self.name, self.recorders = name, recorders

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            for recorder in self.recorders:
                recorder.note(self.name, (grid, args, options))

        return launch


class Stand:
    """Stands for graphs: a replay does the work once more, and records it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.logs: list[Log] = []
        self.recorders: list[Recorder] = []
        self.known, self.captures = set[int](), 0
        patch.setattr(cuda_graphs, "capture", self.capture)
        patch.setattr(gradients, "stays_on_device", lambda _: True)
        patch.setattr(flat, "needs_rate_tensor", lambda _: True)

    def capture(self, work: Callable[[], None]) -> tuple[Callable[[], None], None]:
        self.captures += 1

        def replay() -> None:
            self.logs.append([])
            self.recorders[:] = [Recorder(self.logs[-1], self.known)]
            with self.recorders[0]:
                work()
            self.recorders.clear()

        return replay, None


def step_by_stand(name: str, zero: int) -> tuple[list[Log], list[bool], bool]:
    """What each replay hands to kernels, whether weights are those of kernel by kernel after each step, and whether
    the graph reads the sums of gradients where the engine has them."""
    with compute_by("triton"), pytest.MonkeyPatch.context() as patch:
        stand = Stand(patch)
        patch.setattr(gpu_operations, "usable", lambda *_: name == "lamb in Triton")
        if name == "lamb in Triton":
            from pretraining.model import gpu_lamb

            for kernel in ("_update", "_add", "_move"):
                patch.setattr(gpu_lamb, kernel, NotedKernel(kernel, stand.recorders))
        chosen = {"name": name.split()[0], "clip": 0.5}
        by_kernels, by_graph = (make_engine("fp32", zero, chosen, graphs=graphs) for graphs in ("off", "auto"))
        wanted, optimizer = make_steps(by_kernels), by_graph.optimizer
        states = [optimizer.get_state(each.tensor)["step"] for each in by_graph.flat_tensors]
        optimizer._numbers = [torch.zeros(()) for _ in range(3)]
        stand.known = {each.data_ptr() for each in (*states, *optimizer._numbers)}
        found = make_steps(by_graph)
    sums = getattr(by_graph.deepspeed.optimizer, "fp32_groups_gradient_flat_partition", [])
    reads_sums = [each.data_ptr() for each in sums] == [each.data_ptr() for each in optimizer._kept]
    return stand.logs, [*map(torch.equal, wanted, found)], reads_sums


def step_in_all_ways() -> dict[Any, Any]:
    return {case: step_by_stand(*case) for case in CASES}


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    pytest.importorskip("triton", reason="Triton is not installed")
    [result] = run_connected(1, step_in_all_ways)
    return dict(result)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_are_given_the_same_at_each_step(found: dict[Any, Any], case: tuple[str, int]) -> None:
    """The learning rate and the factor of gradients change, and one step is skipped."""
    logs, same, reads_sums = found[case]
    assert len(logs) == len(RATES) - 1
    assert len(logs[0]) > 3
    for log in logs[1:]:
        assert log == logs[0]
    assert same == [True] * len(RATES)
    assert reads_sums == (case[1] == 1), "under ZeRO 1 no gradient is copied"


def forget_gradient(optimizer: FlatOptimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def move_state(optimizer: FlatOptimizer) -> None:
    state = optimizer.get_state(optimizer.param_groups[0]["params"][0])
    state["exp_avg"] = state["exp_avg"].clone()


def change_decay(optimizer: FlatOptimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def change_nothing(_: FlatOptimizer) -> None:
    """All gradients lie elsewhere than in the step before."""


CHANGES = {forget_gradient: 2, move_state: 2, change_decay: 2, change_nothing: 1}
"""What is changed in the fourth step, and how many graphs all steps take."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_cannot_follow_takes_another_one(
    change: Callable[[FlatOptimizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for graph in (RepeatedWork(""), None):
        stand, draw = Stand(monkeypatch), torch.Generator().manual_seed(1)
        weights = [torch.ones(5), torch.ones(3)]
        optimizer = AdamW(ADAMW, [{"params": weights}], OptimizerSettings())
        optimizer.graph = graph
        for step in range(6):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=draw)
            if step == 3:
                change(optimizer)
            optimizer.param_groups[0]["lr"] = RATES[step]
            optimizer.step()
            found.append(torch.cat(weights))
        assert stand.captures == (CHANGES[change] if graph else 0)
    assert all(map(torch.equal, found[:6], found[6:]))


def test_where_a_capture_fails_kernels_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "capture", fail)
    work, done = RepeatedWork("slow"), list[int]()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(4):
            work.run(lambda step=step: done.append(step), "key")  # type: ignore[misc]
    assert done == [0, 1, 2, 3]
    assert [str(each.message).count("stream is capturing") for each in warned] == [1]


@pytest.fixture
def one_gpu() -> Iterator[None]:
    connect(World(), torch.device("cuda", 0))
    yield
    disconnect()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "zero"), [*product(("adamw", "lamb", "muon"), (0, 1))])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.usefixtures("one_gpu")
def test_a_graph_moves_weights_to_the_same_bits(name: str, zero: int, dtype: str) -> None:
    found = []
    for graphs in ("auto", "off"):
        engine = make_engine(dtype, zero, {"name": name}, device="cuda", graphs=graphs)
        found.append(make_steps(engine))
        graph = engine.optimizer.graph
        assert graphs == "off" or (graph is not None and graph.replay is not None)
        engine.close()
    assert all(map(torch.equal, *found))
