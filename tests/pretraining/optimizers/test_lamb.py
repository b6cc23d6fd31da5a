"""LAMB under every ZeRO stage against LAMB written down once more."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from support.marks import slow
from support.operations import DEVICE, compute_by
from support.optimizer_reference import NVIDIA, error, first_weights, make_engine, read_ratios, reference, run_engine
from support.pretended_gpu import PretendedGpu
from support.processes import spawn
from support.training import connect_ranks, run_connected
from support.watches import Launches, OnlyDeterministic
from torch import Tensor

from pretraining.engine.engine import Engine
from pretraining.model import cpu_kernels as kernels
from pretraining.model import gpu_tiles
from pretraining.model.shape import BIAS, MATRIX
from pretraining.optimizers.lamb import OPTIMIZER, LambSettings
from pretraining.optimizers.steps import lamb as steps
from pretraining.optimizers.steps.flat import FlatTensor, Slice
from pretraining.optimizers.steps.lamb import Lamb
from pretraining.processes.group import disconnect

SETTINGS: dict[str, dict[str, Any]] = {
    "nvidia": NVIDIA,
    "paper": {"clip": 0.0, "bias_correction": False, "weight_decay": 0.1},
    "no decay": {"weight_decay": 0.0},
    "betas": {"betas": (0.8, 0.9)},
}
CASES = [("fp32", 0, "nvidia"), ("fp32", 1, "paper"), ("fp32", 2, "no decay"), ("fp32", 3, "betas")]
CASES += [("bf16", 1, "nvidia"), ("bf16", 2, "nvidia"), ("bf16", 3, "nvidia")]
OFFLOADED = (1, 3)
Results = list[dict[Any, Any]]


def on_all_stages() -> dict[Any, Any]:
    """What one rank finds."""
    found: dict[Any, Any] = {case: run_engine(make_engine(*case[:2], SETTINGS[case[2]])) for case in CASES}
    for zero in OFFLOADED:
        found["offloaded", zero] = run_engine(under_nccl(make_engine("fp32", zero, NVIDIA, offload="optimizer")))[0]
    kernels.allow(False)
    found["torch"] = run_engine(make_engine("fp32", 2, SETTINGS["betas"]))
    found["alone"] = run_engine(make_engine("fp32", 3, SETTINGS["betas"], sub_group_size=1))
    return found


def under_nccl(engine: Engine) -> Engine:
    """LAMB finds NCCL between the ranks, as where it moves what is offloaded from GPUs."""
    step = engine.optimizer.step

    def under_nccl(closure: Any = None) -> None:
        with PretendedGpu():
            step(closure)

    engine.optimizer.step = under_nccl  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module", params=[2, slow(3)])
def found(request: pytest.FixtureRequest) -> tuple[int, Results]:
    return request.param, run_connected(request.param, on_all_stages, timeout=240)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_is_lamb_on_one_process(found: tuple[int, Results], case: tuple[str, int, str]) -> None:
    ranks, results = found
    wanted, ratios = reference(ranks, SETTINGS[case[2]])
    # three ranks' parts of a bf16 gradient are rounded, as bf16 is; those of two are exact
    tolerance = 2**-9 if case[0] == "bf16" and ranks == 3 else 1e-6
    for result in results:
        assert error(result[case][0], wanted) < tolerance
        assert result[case][1] == pytest.approx(ratios, rel=tolerance)
    assert error(first_weights(), wanted) > 1e-3, "nothing has moved"


@pytest.mark.parametrize("case", ["torch", "alone"])
def test_without_our_kernel_it_is_the_same(found: tuple[int, Results], case: str) -> None:
    """Also where each parameter moves alone, and ranks have nothing of the smallest."""
    ranks, results = found
    wanted, ratios = reference(ranks, SETTINGS["betas"])
    assert error(results[0][case][0], wanted) < 1e-6
    assert results[0][case][1] == pytest.approx(ratios, rel=1e-6)


def test_with_the_optimizer_in_the_hosts_memory(found: tuple[int, Results]) -> None:
    ranks, results = found
    wanted, _ = reference(ranks, NVIDIA)
    for zero in OFFLOADED:
        assert error(results[-1]["offloaded", zero], wanted) < 1e-6, zero


def connect_twice() -> list[dict[str, Any]]:
    """What one rank finds in a group, and after it in another."""
    found = []
    for _ in range(2):
        connect_ranks()
        found.append(run_engine(make_engine("fp32", 2, NVIDIA))[0])
        disconnect()
    return found


def test_an_engine_works_in_the_next_group_of_its_process() -> None:
    [done] = spawn(1, connect_twice)
    assert (done.code, done.errors) == (0, "")
    for weights in done.result:
        assert error(weights, reference(1, NVIDIA)[0]) < 1e-6


CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROLES = {"small": BIAS, "fused": MATRIX._replace(parts=3), "rest": MATRIX}
SIZES = {"small": 7, "fused": 3 * 40, "rest": 33}


class Twin:
    """LAMB with two flat tensors: the parameters of one decay, those of the other do not."""

    def __init__(self, device: torch.device, **chosen: Any):
        self.draw = torch.Generator().manual_seed(1)
        self.flats = [torch.randn(sum(SIZES.values()), generator=self.draw).to(device) for _ in range(2)]
        settings = LambSettings.model_validate({"name": "lamb", **chosen})
        rest = {"params": self.flats[1:], "weight_decay": 0.0, "decays": False}
        groups: list[dict[str, Any]] = [{"params": self.flats[:1]}, rest]
        self.lamb = Lamb(OPTIMIZER, groups, settings)
        self.lamb.prepare([held(flat) for flat in self.flats], ROLES, {})

    def step(self) -> None:
        for flat in self.flats:
            flat.grad = torch.randn(flat.shape, generator=self.draw).to(flat.device)
        for group in self.lamb.param_groups:
            group["lr"] = 0.5
        self.lamb.step()

    def everything(self) -> list[Tensor]:
        """Weights, and all that is kept of them: averages, and the number of steps."""
        return [*self.flats, *(each for flat in self.flats for each in self.lamb.get_state(flat).values())]

    def moves(self) -> list[Tensor]:
        """How far the next step moves each parameter."""
        before = [flat.to(CPU, copy=True) for flat in self.flats]
        self.step()
        moves = [flat.to(CPU) - old for flat, old in zip(self.flats, before, strict=True)]
        return [part for move in moves for part in torch.split(move, list(SIZES.values()))]


def held(flat: Tensor) -> FlatTensor:
    """The parameters of `SIZES`, end to end."""
    parts, offset = [], 0
    for name, size in SIZES.items():
        parts.append(Slice(name, 0, size, offset))
        offset += size
    return FlatTensor(flat, SIZES, tuple(parts))


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"bias_correction": False},
        {"weight_decay": 0.0},
        {"betas": (0.8, 0.9)},
    ],
    ids=str,
)
def test_lamb_by_pytorch_on_a_gpu_is_lamb(chosen: dict[str, Any]) -> None:
    """As by our kernel on a CPU."""
    wanted = Twin(CPU, **chosen)
    with PretendedGpu():
        twin = Twin(GPU, **chosen)
    for step in range(6):
        with PretendedGpu():
            found = twin.moves()
        for ours, theirs in zip(found, wanted.moves(), strict=True):
            assert float((ours - theirs).norm()) < 1e-6 * float(theirs.norm()), step


def test_the_host_waits_for_no_gpu() -> None:
    with PretendedGpu() as gpu:
        twin = Twin(GPU)
        for factor in (1.0, math.nan):
            twin.lamb.scale = torch.tensor(factor).to(GPU)
            twin.step()  # makes the averages
            gpu.waits = 0
            twin.step()
            assert gpu.waits == 0
        gpu.waits = 0
        read_ratios(twin.lamb)
        assert gpu.waits > 0, "here it must"


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    with PretendedGpu():
        twin = Twin(GPU)
        twin.step()
        before = [each.to(CPU, copy=True) for each in twin.everything()]
        twin.lamb.scale = torch.tensor(math.nan).to(GPU)
        twin.step()
        assert all(map(torch.equal, before, [each.to(CPU) for each in twin.everything()]))
        twin.lamb.scale = 1.0
        twin.step()
        after = [each.to(CPU) for each in twin.everything()]
    assert not any(map(torch.equal, before, after))


def test_a_step_on_a_gpu_takes_deterministic_operations() -> None:
    with PretendedGpu():
        twin = Twin(GPU)
        with OnlyDeterministic() as operations:
            twin.step()
    assert {"lerp", "sum", "where"} <= operations.seen


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of tests have several chunks and tiles, as real ones do."""
    gpu_lamb = pytest.importorskip("pretraining.model.gpu_lamb", reason="Triton is not installed")
    for module, name, value in [(gpu_tiles, "CHUNK", 32), (gpu_lamb, "CHUNK", 32), (gpu_lamb, "TILE", 16)]:
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "chosen", [{}, {"bias_correction": False, "weight_decay": 0.0}, {"betas": (0.0, 0.9)}], ids=str
)
def test_lamb_by_our_kernels_on_a_gpu_is_lamb(chosen: dict[str, Any]) -> None:
    """Also after a gradient that is not finite, which moves nothing."""
    wanted, twin = Twin(CPU, **chosen), Twin(DEVICE, **chosen)
    for step in range(6):
        with compute_by("triton"):
            found = twin.moves()
        for ours, theirs in zip(found, wanted.moves(), strict=True):
            assert float((ours - theirs).norm()) < 1e-6 * float(theirs.norm()), step
        assert read_ratios(twin.lamb) == pytest.approx(read_ratios(wanted.lamb), rel=1e-6)
        before = [each.clone() for each in twin.everything()]
        for lamb in (twin.lamb, wanted.lamb):
            lamb.scale = torch.tensor(math.nan, device=lamb.param_groups[0]["params"][0].device)
        with compute_by("triton"):
            twin.step()
        wanted.step()
        assert all(map(torch.equal, before, twin.everything()))
        twin.lamb.scale = wanted.lamb.scale = 1.0


def move_share(begin: int, end: int, device: torch.device, squares: Tensor | None, patch: Any) -> tuple[Tensor, Tensor]:
    """Makes a step of the numbers from `begin` to `end` with `same_bits`; returns the weights, and this rank's squares.
    `squares` are those of all ranks, where this one has not all numbers."""
    (flat, gradient), parts, offset, own = torch.randn(2, sum(SIZES.values())), [], 0, list[Tensor]()
    for name, size in SIZES.items():
        first, last = max(offset, begin), min(offset + size, end)
        if first < last:
            parts.append(Slice(name, first - offset, last - first, first - begin))
        offset += size
    weights = flat[begin:end].to(device, copy=True)
    weights.grad = gradient[begin:end].to(device, copy=True)
    lamb = Lamb(OPTIMIZER, [{"params": [weights], "lr": 0.5}], LambSettings())
    lamb.same_bits = True
    lamb.prepare([FlatTensor(weights, SIZES, tuple(parts))], ROLES, {})

    def add(mine: Tensor, group: Any) -> Tensor:
        assert group is None
        own.append(mine.clone())
        return mine if squares is None else squares

    patch.setattr(steps, "add_over_group", add)
    lamb.step()
    return weights, own[0]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("way", ["kernels", "torch", "triton"])
def test_shares_of_blocks_move_by_the_bits_of_the_whole(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BLOCK", 32)
    total, cut = sum(SIZES.values()), SIZES["small"] + 64  # within the second of three parameters that are joined
    with compute_by(way) as device:
        found = list[tuple[Tensor, Tensor]]()
        for begin, end in [(0, total), (0, cut), (cut, total)]:
            torch.manual_seed(3)
            squares = found[0][1] if found else None
            found.append(move_share(begin, end, device, squares, monkeypatch))
    (whole, squares), *shares = found
    assert torch.equal(whole, torch.cat([weights for weights, _ in shares]))
    assert torch.equal(squares, shares[0][1] + shares[1][1])
    assert len(squares) == 9


def test_a_step_on_a_gpu_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are: three kernels of ours for a flat tensor, and some operations of PyTorch."""
    gpu_lamb, ours = pytest.importorskip("pretraining.model.gpu_lamb", reason="Triton is not installed"), list[int]()
    for name in ("_update", "_add", "_move"):
        monkeypatch.setattr(gpu_lamb, name, defaultdict(lambda: lambda *_, **__: ours.append(1)))
    with compute_by("triton"):
        twin = Twin(DEVICE)
        twin.step()
        ours.clear()
        for flat in twin.flats:
            flat.grad = torch.ones_like(flat)
        with Launches() as theirs:
            twin.lamb.step()
    assert len(ours) == 3 * len(twin.flats)
    assert theirs.count <= 4 * len(twin.lamb.param_groups)
