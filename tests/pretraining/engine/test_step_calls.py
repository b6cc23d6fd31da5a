"""What a step of training asks of the host beside a GPU, counted without one: launches, and calls of Python.

Tensors lie on the host and say that they are on a GPU. Kernels in Triton and the graph of the optimizer do nothing;
PyTorch computes, from what memory holds, and what it would launch is counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.marks import has_gpu
from support.operations import as_on_a_gpu
from support.pretraining_reference import SMALL, random_batch
from support.watches import Launches
from torch import Tensor
from torch.overrides import TorchFunctionMode

from data_prep.common.launchers import World
from pretraining import devices
from pretraining.config.settings import Optimizer, Parallel, Precision
from pretraining.engine import gradients
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds, train_step
from pretraining.model import cuda_graphs, gpu_layouts
from pretraining.model import gpu_operations as gpu
from pretraining.model.batch import PretrainingBatches
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.optimizers.steps import flat
from pretraining.processes.group import connect, disconnect

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(has_gpu(), reason="the host is counted without a GPU")
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
PLACES = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True, Tensor.is_pinned: True}  # type: ignore[attr-defined]
SHAPE = replace(SMALL, hidden=128, heads=2, intermediate=512)
LAYERS, PARAMETERS = 3, 12
"""The layers of the model, and the parameters of each."""
FOLDERS = {
    "model": (f"{ROOT}/pretraining/", "/torch/nn/modules/", "/torch/autograd/"),
    "engine": (f"{ROOT}/pretraining/engine/", f"{ROOT}/pretraining/optimizers/", "/deepspeed/", "/torch/distributed/"),
}
"""Whose functions count, and as what; the last that fits."""
Counts = Counter[tuple[str, str]]
"""Launches, calls of the model's functions and of the engine's, in each part of a step."""


class SaysGpu(TorchFunctionMode):
    """Tensors of the host say that they are on a GPU, and stay where they are."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PLACES:
            return PLACES[function]
        if function is Tensor.to:
            args = tuple(each for each in args if not isinstance(each, torch.device))
        elsewhere = {"device": HOST} if "device" in (kwargs or {}) else {}
        return function(*args, **{**(kwargs or {}), **elsewhere})


class Counting:
    """Counts launches and calls in the part of a step that is at work; a part within another is not counted there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.counts, self.part, self.launches = patch, Counts(), "loss", Launches()

    def launch(self, *_: Any, **__: Any) -> None:
        """Stands for a kernel of ours, or for a graph."""
        self.launches.count += 1

    def enter(self, part: str) -> str:
        """Counts for a part from now on; returns the one before."""
        self.counts[self.part, "launches"] += self.launches.count
        self.launches.count = 0
        before, self.part = self.part, part
        return before

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Makes a function a part."""
        work = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(part)
            try:
                return work(*args, **kwargs)
            finally:
                self.enter(before)

        self.patch.setattr(owner, name, counted)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        kinds = [kind for kind, folders in FOLDERS.items() if any(each in frame.f_code.co_filename for each in folders)]
        if event == "call" and kinds:
            self.counts[self.part, kinds[-1]] += 1


class Kernel:
    """Stands for a kernel that is launched without `_launch`."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self.launch


def take_the_way_of_a_gpu(patch: pytest.MonkeyPatch, counting: Counting) -> None:
    """Whoever asks is told of a GPU; what would run there is counted."""
    as_on_a_gpu(patch)
    patch.setattr(gpu, "usable", lambda *_: True)
    patch.setattr(devices, "has_flash", lambda _: True)
    patch.setattr(gpu_layouts, "_choice", "own")
    patch.setattr(torch, "manual_seed", lambda _: None)
    patch.setattr(Tensor, "pin_memory", Tensor.detach)
    patch.setattr(gradients, "stays_on_device", lambda _: True)
    patch.setattr(flat, "needs_rate_tensor", lambda _: True)
    patch.setattr(cuda_graphs, "capture", lambda work: (counting.launch, work()))
    patch.setattr("pretraining.model.gpu_kernels._launch", counting.launch)
    for kernel in ("gpu_cross_entropy._cross_entropy", "gpu_row_keys._row_keys"):
        patch.setattr(f"pretraining.model.{kernel}", Kernel(counting.launch))
    for kernel in ("_update", "_add", "_move"):
        patch.setattr(f"pretraining.model.gpu_lamb.{kernel}", Kernel(counting.launch))


def count_step(layers: int, optimizer: str) -> Counts:
    """Counts the fourth step: the second captures the graph, the third is the first to find everything there."""
    with pytest.MonkeyPatch.context() as patch:
        settings = EngineSettings(
            Optimizer.model_validate({"name": optimizer}), Precision(dtype="bf16"), Parallel(zero=1)
        )
        engine = Engine(build_model(replace(SHAPE, layers=layers)).initialize(1), settings, HOST)
        counting, engine.device = Counting(patch), GPU
        for bucket in engine.deepspeed.optimizer._buckets:
            bucket.gathers = True
        take_the_way_of_a_gpu(patch, counting)
        for owner, name in ((engine, "forward"), (engine, "backward"), (engine, "step")):
            counting.watch(owner, name, name)
        counting.watch(engine.optimizer, "step", "optimizer")
        batch = random_batch([90] * 32, SHAPE.vocabulary)
        norms: list[Any] = []
        batches = PretrainingBatches((batch,), len(batch.lengths), len(batch.labels))
        with SaysGpu(), counting.launches:
            for step in range(4):
                counting.enter("loss")
                counting.counts.clear()
                sys.setprofile(counting.note)
                try:
                    norms.append(train_step(engine, batches, 1e-3, Seeds(step, step), MLM.loss).gradient_norm)
                finally:
                    sys.setprofile(None)
            counting.enter("loss")
        assert len({norm.data_ptr() for norm in norms}) == 4, "a graph overwrites the norm of the step before"
        engine.close()
    return counting.counts


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    connect(World(), HOST)
    yield
    disconnect()


@pytest.fixture(scope="module")
def found() -> tuple[Counts, Counts]:
    """The counts of a layer, and of all else."""
    more, less = (count_step(layers, "adamw") for layers in (LAYERS + 1, LAYERS))
    layer = Counts({key: more[key] - less[key] for key in more})
    return layer, Counts({key: less[key] - LAYERS * layer[key] for key in less})


def add_up(counts: Counts, *parts: str) -> tuple[int, int, int]:
    """The launches of some parts, and the calls of the model's functions and of the engine's."""
    launches, model, engine = (sum(counts[part, kind] for part in parts) for kind in ("launches", *FOLDERS))
    return launches, model, engine


def assert_most(found: Sequence[int], *most: int) -> None:
    assert all(count <= limit for count, limit in zip(found, most, strict=True)), found


def test_a_layer_of_a_step(found: tuple[Counts, Counts]) -> None:
    """DeepSpeed's hooks call the engine for each parameter."""
    layer, _ = found
    assert_most(add_up(layer, "forward"), 8, 115, 0)
    assert_most(add_up(layer, "backward"), 16, 33, 3 * PARAMETERS)
    assert_most(add_up(layer, "loss", "step", "optimizer"), 0, 0, 0)


def test_all_else_in_a_step(found: tuple[Counts, Counts]) -> None:
    """Embeddings, heads and loss; and the step itself, whose graph includes norm, clipping and rounding: beside it, the
    learning rates are written and the norm is copied."""
    _, rest = found
    assert_most(add_up(rest, "forward", "loss"), 33, 156, 77)
    assert_most(add_up(rest, "backward"), 47, 36, 170)
    assert_most(add_up(rest, "step"), 1, 14, 47)
    assert_most(add_up(rest, "optimizer"), 3, 10, 14)


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_a_graph_makes_the_steps_of_all_optimizers(optimizer: str, found: tuple[Counts, Counts]) -> None:
    counts = count_step(LAYERS, optimizer)
    assert_most(add_up(counts, "step", "optimizer"), *add_up(found[1], "step", "optimizer"))
