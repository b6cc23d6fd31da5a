"""The engine under every ZeRO stage against PyTorch alone, what DeepSpeed is told, and one step of training."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from support import engine_steps
from support import optimizer_reference as by_forces
from support.mesh import collect_weights
from support.pretraining_reference import SMALL, gradients, random_batch
from support.processes import run_program
from support.training import run_connected
from torch import Tensor

from pretraining.config.settings import Parallel
from pretraining.engine import deepspeed_config
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.step import Seeds
from pretraining.model.batch import PretrainingBatch, PretrainingBatches
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.objectives.mlm import Losses
from pretraining.planning import memory

ALL = [*(("fp32", zero) for zero in range(4)), *(("bf16", zero) for zero in (1, 2, 3))]
LENGTHS = [(20, 31, 9, 16), (12, 40, 5, 8)]
"""the sequences' lengths on rank 0, and on rank 1"""
QUIET = dataclasses.replace(SMALL, dropout=0.0, attention_dropout=0.0)

EPSILON = 1e6
PLAIN_DESCENT = {"betas": (0.0, 0.0), "epsilon": EPSILON, "weight_decay": 0.0}
"""with these, AdamW's step is the gradient times the learning rate by EPSILON"""
CLIP, REPEATS = 0.5, 4
STRETCH = 1000.0
"""times the gradient: weights move so far that what their rounding hides does not matter"""


def make_engine(dtype: str, zero: int, clip: float = 0.0) -> Engine:
    chosen = {"name": "adamw", "clip": clip, **PLAIN_DESCENT}
    return by_forces.make_engine(dtype, zero, chosen, model=build_model(QUIET).initialize(7))


def mean_loss(losses: Losses, batch: PretrainingBatch, ranks: int) -> Tensor:
    """A rank's part of the loss of the global batch; its counts need not be exact here."""
    batches = PretrainingBatches((batch,), ranks * len(batch.lengths), ranks * len(batch.labels))
    return MLM.loss(losses, batches)


def one_step(engine: Engine, repeats: int) -> tuple[dict[str, Tensor], float]:
    """The gradients of this rank's batch, done so many times and divided by it, as far as the step moves the weights;
    and their norm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = random_batch(LENGTHS[rank], QUIET.vocabulary, seed=rank, first=10 * rank)
    before, marks = collect_weights(engine), list[int]()
    for index in range(repeats):
        loss = mean_loss(engine.forward(batch), batch, ranks) / repeats
        engine.backward(loss, last=index == repeats - 1, mark=lambda: marks.append(1))
    assert len(marks) == repeats, "in a backward pass without a mark, a rank that hangs is not told from others"
    engine.step(STRETCH * EPSILON)
    after = collect_weights(engine)
    return {name: (before[name] - after[name]) / STRETCH for name in before}, float(engine.gradient_norm or math.nan)


def on_all_stages() -> dict[str, Any]:
    """What one rank finds; see the tests."""
    found: dict[str, Any] = {}
    for dtype, zero in ALL:
        engine = make_engine(dtype, zero, clip=CLIP)
        found[f"{dtype} {zero} weights"] = collect_weights(engine)
        found[f"{dtype} {zero}"] = one_step(engine, REPEATS)
        if dtype == "bf16":
            found[f"{dtype} {zero} whole"] = one_step(make_engine(dtype, zero), 1)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of rank 0 among two. DeepSpeed compiles nothing, and leaves no shared memory behind."""
    extensions, shared = tmp_path_factory.mktemp("extensions"), set(Path("/dev/shm").glob("deepspeed_*"))
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    results = run_connected(2, on_all_stages, timeout=150, environment=environment)
    assert not list(extensions.iterdir())
    assert set(Path("/dev/shm").glob("deepspeed_*")) <= shared
    return results[0]  # type: ignore[no-any-return]


def reference() -> dict[str, Tensor]:
    """By PyTorch alone, of the batches of both ranks."""
    model = build_model(QUIET).initialize(7)
    for rank in range(2):
        batch = random_batch(LENGTHS[rank], QUIET.vocabulary, seed=rank, first=10 * rank)
        mean_loss(model(batch), batch, 2).backward()
    return gradients(model)


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    assert found.keys() == wanted.keys()
    apart = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return math.sqrt(apart / sum(float(part.square().sum()) for part in wanted.values()))


@pytest.mark.parametrize(("dtype", "zero"), ALL)
def test_gradients_are_those_of_pytorch_alone(found: dict[str, Any], dtype: str, zero: int) -> None:
    """Added up over micro-batches in fp32, then clipped. A fourth of the same gradient, four times, is exact in fp32,
    and not where sums are rounded to bf16."""
    (moved, norm), wanted = found[f"{dtype} {zero}"], reference()
    tolerance, tied = 1e-5 if dtype == "fp32" else 0.03, "embeddings.word.weight"
    full = math.sqrt(sum(float(part.square().sum()) for part in wanted.values()))
    assert norm == pytest.approx(full, rel=tolerance), "before it is clipped"
    assert norm > CLIP, "nothing is clipped"
    clipped = clip(wanted)
    assert distance(moved, clipped) < tolerance
    assert distance({tied: moved[tied]}, {tied: clipped[tied]}) < tolerance, "it is looked up, and decodes"
    if dtype == "bf16":
        whole, same_norm = found[f"{dtype} {zero} whole"]
        assert distance(whole, wanted) < tolerance
        assert same_norm == pytest.approx(norm, rel=1e-5)
        assert distance(moved, clip(whole)) < 1e-6
        parts = {name: (part / REPEATS).bfloat16() for name, part in whole.items()}
        rounded = {name: sum([part] * REPEATS, torch.zeros_like(part)).float() for name, part in parts.items()}
        assert distance(rounded, whole) > 1e-4, "so the test can fail"


def clip(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norm = math.sqrt(sum(float(part.square().sum()) for part in gradients.values()))
    return {name: part * min(1.0, CLIP / norm) for name, part in gradients.items()}


@pytest.mark.parametrize(("dtype", "zero"), ALL)
def test_weights_are_given_in_full_and_in_fp32(found: dict[str, Any], dtype: str, zero: int) -> None:
    fresh = {name: weight.detach() for name, weight in build_model(QUIET).initialize(7).named_parameters()}
    given = found[f"{dtype} {zero} weights"]
    assert {name: part.shape for name, part in given.items()} == {name: part.shape for name, part in fresh.items()}
    assert distance(given, fresh) < (1e-7 if dtype == "fp32" else 0.01)


def test_the_loss_scale_grows_after_the_step() -> None:
    """DeepSpeed would divide the gradient by the new scale, which it had not been multiplied with."""
    from pretraining.engine.deepspeed_parts import let_scale_grow_after_step

    class Scaled:
        loss_scale, divided_by = 4.0, 0.0

        def _update_scale(self, has_overflow: bool = False) -> None:
            self.loss_scale *= 0.5 if has_overflow else 2

        def step(self, overflow: bool = False) -> None:
            self._update_scale(overflow)
            self.divided_by = self.loss_scale

    engine = Engine.__new__(Engine)
    scaled = Scaled()
    scaled.param_groups = []  # type: ignore[attr-defined]
    engine.deepspeed, engine.zero = SimpleNamespace(optimizer=scaled, step=scaled.step), 1
    engine._after_step = let_scale_grow_after_step(scaled)
    engine.step(1.0)
    assert (scaled.divided_by, scaled.loss_scale) == (4.0, 8.0)
    engine.deepspeed.step = lambda: scaled.step(overflow=True)
    engine.step(1.0)
    assert (scaled.divided_by, scaled.loss_scale) == (4.0, 4.0)


def test_the_parts_that_are_replaced_are_of_the_version_that_is_pinned() -> None:
    from pretraining.engine.deepspeed_parts import VERSION

    assert f'"deepspeed=={VERSION}"' in (ROOT / "pyproject.toml").read_text()


STAGES = [("fp32", 0), ("bf16", 1), ("bf16", 2), ("fp32", 3)]
SMALL_BUCKET = 1234


def count_waits_and_buckets() -> dict[Any, Any]:
    """How often DeepSpeed waits for the device in six steps, and the buckets that it takes."""
    from deepspeed.accelerator import get_accelerator

    waits: list[None] = []
    setattr(get_accelerator(), "synchronize", lambda *_: waits.append(None))  # noqa: B010
    found: dict[Any, Any] = {}
    for case in STAGES:
        engine = by_forces.make_engine(*case, by_forces.NVIDIA)
        waits.clear()
        by_forces.run_engine(engine)
        found[case] = len(waits), getattr(engine.deepspeed.optimizer, "reduce_bucket_size", None)
    own = by_forces.make_engine("fp32", 2, by_forces.NVIDIA, reduce_bucket_size=SMALL_BUCKET)
    found["own"] = own.deepspeed.optimizer.reduce_bucket_size
    return found


def test_deepspeed_does_not_wait_for_the_device_and_takes_buckets_no_larger_than_the_model() -> None:
    """Unless the user says another size."""
    (found,) = run_connected(1, count_waits_and_buckets)
    assert [found[case][0] for case in STAGES] == [0] * len(STAGES)
    buckets = {found[case][1] for case in STAGES} - {None}
    assert buckets == {sum(parameter.numel() for parameter in build_model(by_forces.SHAPE).parameters())}
    assert found["own"] == SMALL_BUCKET


def test_large_models_get_deepspeeds_own_bucket() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    default = DeepSpeedZeroConfig.model_fields["reduce_bucket_size"].default
    made = deepspeed_config.make_deepspeed_config(EngineSettings(), torch.float32, torch.device("cuda"), 1, 10**10)
    assert made["zero_optimization"]["reduce_bucket_size"] == default == memory.BUCKET


def test_gradients_are_never_added_up_in_16_bits() -> None:
    settings = EngineSettings(parallel=Parallel(zero=0))
    assert [settings.zero_stage(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)] == [0, 1, 1]


def test_every_step_drops_other_elements_and_every_rank_draws_others() -> None:
    found = [Seeds.derive(seed, step, rank) for seed in (1, 2) for step in range(9) for rank in range(3)]
    assert len({seeds.generator for seeds in found}) == 2 * 9 * 3
    assert len({seeds.dropout for seeds in found}) == 2 * 9, "a mask is of an example, on whichever rank"


def test_a_run_gives_the_same_bits_twice(tmp_path: Path) -> None:
    """By the program that tests of GPUs start."""
    done = run_program(engine_steps.__file__, ["cpu", "fp32", "lamb"], tmp_path)
    assert (done.output.split(), done.errors) == (["True", "True"], "")
