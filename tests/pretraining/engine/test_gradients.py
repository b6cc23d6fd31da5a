"""Gradients under ZeRO 1: which bucket holds what, the sums of steps, and what the ranks make of them together."""

import gc
import itertools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.engine_steps import assert_leaves_out
from support.marks import slow
from support.pretraining_reference import SMALL
from support.training import run_connected
from torch import Tensor, nn

from data_prep.common.launchers import World
from pretraining.config.settings import Optimizer, Parallel, Precision
from pretraining.engine import exchange
from pretraining.engine import gradients as gradients
from pretraining.engine.buckets import Bucket, make_buckets
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.model import cpu_kernels
from pretraining.model.encoder import Trainable
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model
from pretraining.processes.group import connect, disconnect

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(sizes=SIZES, ranks=st.integers(1, 5), limit=st.integers(1, 90))
def test_buckets_hold_every_element_once_and_know_whose_it_is(sizes: list[int], ranks: int, limit: int) -> None:
    share = -(-sum(sizes) // ranks)
    flat = torch.arange(ranks * share, dtype=torch.float32)
    buckets = list(make_buckets(flat, [(size,) for size in sizes], ranks, limit))
    numbers = [number for bucket in reversed(buckets) for number in bucket.views]
    assert numbers == list(range(len(sizes)))
    held = torch.cat([bucket.sums for bucket in reversed(buckets)])
    assert torch.equal(held, flat)
    assert torch.equal(torch.cat([*buckets[0].views.values(), flat[sum(sizes) :]]), buckets[0].sums)
    for bucket in buckets[1:]:
        assert torch.equal(torch.cat(list(bucket.views.values())), bucket.sums)
    for bucket in buckets:
        assert torch.equal(torch.cat([own.sums for own in bucket.shares]), bucket.sums)
        assert all(int(element) // share == own.owner for own in bucket.shares for element in own.sums)
        assert sum(map(len, bucket.views.values())) <= limit or len(bucket.views) == 1


def bucket_of(sizes: Sequence[int], gathers: bool) -> Bucket:
    """One bucket, whose sums are of an earlier step."""
    flat = torch.full((sum(sizes),), 1000.0)
    (bucket,) = make_buckets(flat, [(size,) for size in sizes], 1, 10**6)
    bucket.gathers = gathers  # as on a GPU
    return bucket


@given(
    sizes=SIZES,
    passes=st.lists(st.lists(st.integers(0, 8)), min_size=1, max_size=4),
    gathers=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),  # our kernels know the first alone
)
def test_sums_are_of_what_came(sizes: list[int], passes: list[list[int]], gathers: bool, dtype: torch.dtype) -> None:
    """Of several backward passes, in each of which some parameters get a gradient, or several, in any order."""
    bucket, wanted = bucket_of(sizes, gathers), [torch.zeros(size) for size in sizes]
    for turn, numbers in enumerate(passes):
        for number in (number for number in numbers if number < len(sizes)):
            gradient = (torch.arange(sizes[number]) + 10 * turn + number).to(dtype)
            bucket.take(number, gradient)
            wanted[number] += gradient.float()
        bucket.end_pass()
    bucket.complete()
    assert torch.equal(bucket.sums, torch.cat(wanted))


class Parts(Trainable):
    """Parameters of which a call uses those that it names: each of their elements has the gradient that it is given."""

    def __init__(self) -> None:
        super().__init__(Shape(1, 1, 1, 1, 1))
        self.norm = nn.LayerNorm(9)  # never used, and in the last buckets of all
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (7, 30, 1, 12, 64, 5))

    def forward(self, uses: dict[int, float]) -> Tensor:
        return torch.stack([self.parts[number].sum() * pull for number, pull in uses.items()]).sum().float()


USES: list[list[list[dict[int, float]]]] = [
    [[{0: 1.0, 1: 2.0, 4: 4.0}, {1: 0.5, 3: 1.0}], [{0: 2.0, 1: 1.0, 2: 8.0, 3: 0.25, 4: 1.0, 5: 4.0}]],
    [[{5: 1.0}], [{0: 16.0}]],
    [[{3: math.inf}], [{3: 1.0}]],
    [[{2: 1.0}], [{2: 3.0, 4: 1.0}]],
    [[{number: 1.0 + number for number in range(6)}], [{1: 1.0}]],
]
"""steps, of each rank its micro-batches, of each what it uses"""
DESCENT: dict[str, Any] = {"betas": (0.0, 0.0), "epsilon": 1e8, "weight_decay": 0.0}
"""AdamW's step is then the gradient times the learning rate by epsilon"""


turns: list[str] = []
"""what a rank does in a backward pass, in its order: its own gradients are there, those of others are waited for"""


def moved(dtype: str, clip: float, gathers: bool = False, **deepspeed: Any) -> list[tuple[dict[str, Tensor], float]]:
    """How far each step moves the weights, in units of the gradient, and its norm."""
    settings = EngineSettings(
        Optimizer(clip=clip, **DESCENT),
        Precision.model_validate({"dtype": dtype}),
        Parallel(zero=1),
        deepspeed=deepspeed,
    )
    model: Any = Parts()
    engine = Engine(model, settings, torch.device("cpu"))
    for bucket in engine.deepspeed.optimizer._buckets:
        bucket.gathers = gathers
    found = []
    for step in USES:
        before = {name: weight.clone() for name, weight in engine.weights()}
        mine = step[dist.get_rank() % len(step)]
        for number, uses in enumerate(mine):
            engine.backward(engine.forward(uses), last=number == len(mine) - 1, mark=lambda: turns.append("own"))
        engine.step(1e8)
        after = dict(engine.weights())
        found.append(({name: before[name] - after[name] for name in before}, float(engine.gradient_norm or 0)))
    return found


def on_ranks() -> dict[str, Any]:
    """What a rank finds with buckets of a few parameters, clipped and not, and with bf16 between the ranks."""
    gradients.BUCKET_SIZE = 40
    sent = watch_sending()
    found: dict[str, Any] = {"neighbours": moved("bf16", 0.0), "clipped neighbours": moved("bf16", 2.0)}
    vars(gradients)["find_neighbours"] = lambda *_: None  # as on two machines
    found |= {
        "gathered": moved("bf16", 0.0, gathers=True),
        "bf16": moved("bf16", 0.0),
        "fp32": moved("fp32", 0.0),
        "clipped": moved("bf16", 2.0),
        "bf16 between ranks": moved("fp32", 0.0, communication_data_type="bf16"),
    }
    found["sent"], found["turns"] = sent, turns
    return found


def watch_sending() -> list[str]:
    """Lists, from now on, by what each bucket is sent: in a backward pass, or at the end of the step's last one."""
    sent, send, join = [], exchange.Network._send, gradients.Zero1.reduce_gradients

    def joining(optimizer: gradients.Zero1, **more: Any) -> None:
        turns.append("others")
        join(optimizer, **more)

    def watched(network: exchange.Network, bucket: Bucket) -> None:
        sent.append(sys._getframe(1).f_code.co_name)
        send(network, bucket)

    exchange.Network._send = watched  # type: ignore[method-assign, assignment]
    gradients.Zero1.reduce_gradients = joining  # type: ignore[method-assign, assignment]
    return sent


@pytest.fixture(scope="module", params=[2, slow(3)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_connected(request.param, on_ranks, timeout=150)


def wanted_gradient(step: int, ranks: int) -> dict[str, Tensor]:
    """The sums over micro-batches and ranks, by hand."""
    sums = {name: torch.zeros_like(part) for name, part in Parts().named_parameters()}
    for rank in range(ranks):
        for uses in USES[step][rank % 2]:
            for number, pull in uses.items():
                sums[f"parts.{number}"] += pull
    return sums


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        *((kind, math.inf) for kind in ("bf16", "gathered", "fp32", "bf16 between ranks", "neighbours")),
        *((kind, 2.0) for kind in ("clipped", "clipped neighbours")),
    ],
)
def test_ranks_move_by_the_sum_of_their_gradients(ranks: list[dict[str, Any]], kind: str, limit: float) -> None:
    """Also where a rank has none for a parameter, in a step or at all. A step whose gradient is not finite moves
    nothing, and is forgotten in the next."""
    for step, found in itertools.product(range(len(USES)), ranks):
        wanted = wanted_gradient(step, len(ranks))
        norm = math.sqrt(sum(float(part.square().sum()) for part in wanted.values()))
        assert norm > 2.0, "nothing is clipped"
        steps, told = found[kind][step]
        assert told == pytest.approx(norm, rel=1e-6)
        for name, part in wanted.items():
            moved = part * min(1.0, limit / norm) if math.isfinite(norm) else torch.zeros_like(part)
            torch.testing.assert_close(steps[name], moved, rtol=1e-4 if limit == 2.0 else 1e-5, atol=1e-5)


def test_ranks_send_while_they_still_compute(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 uses all parameters in the last step, and the others one: they send later, and the sums are right."""
    inside = [found["sent"].count("join_full") for found in ranks]
    assert inside[0] > inside[1] > 0
    assert len({len(found["sent"]) for found in ranks}) == 1


def test_a_rank_marks_that_its_own_gradients_are_there_before_it_waits(ranks: list[dict[str, Any]]) -> None:
    """Otherwise nobody could say for which rank the others wait."""
    for rank, found in enumerate(ranks):
        once = [turn for step in USES for turn in (*["own"] * len(step[rank % 2]), "others")]
        assert found["turns"] == once * 7


@pytest.mark.parametrize(
    ("name", "zero", "on_device", "poison", "same_bits"),
    [
        ("muon", 0, False, math.nan, False),
        ("lamb", 1, False, math.inf, False),
        *((name, 1, True, math.nan, same_bits) for name in ("adamw", "lamb", "muon") for same_bits in (False, True)),
    ],
)
@pytest.mark.usefixtures("alone")
def test_no_optimizer_takes_a_gradient_that_is_not_finite(
    name: str, zero: int, on_device: bool, poison: float, same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights, averages nor the number of steps; nor where the host does not look, as with a GPU's norm."""
    if on_device:
        monkeypatch.setattr(gradients, "stays_on_device", lambda _: True)
        monkeypatch.setattr(cpu_kernels, "usable", lambda *_: False)
    assert_leaves_out(poison, torch.device("cpu"), name, zero, same_bits)


@pytest.mark.parametrize(("ranks", "whole"), [(2, False), (256, True)])
def test_many_ranks_join_whole_tensors_at_once(ranks: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reduces to one rank after another, which takes long where a bucket has the shares of many."""
    sent = Mock()
    monkeypatch.setattr(dist, "get_world_size", lambda *_: ranks)
    monkeypatch.setattr(exchange, "launches_together", lambda _: True)
    monkeypatch.setattr(exchange, "Joining", sent)
    flat = torch.full((25_600,), 1000.0)
    buckets, network = list(make_buckets(flat, [(800,)] * 32, ranks, 2000)), exchange.Network(torch.float32)
    network.prepare([flat], None, 2000)
    for bucket in buckets:
        for number in bucket.views.keys() - {5}:
            bucket.take(number, torch.ones(800))
        network.join_full(buckets)
    network.join(buckets)
    wanted = [(25_600, 256)] if whole else [(len(bucket.sums), len(bucket.shares)) for bucket in buckets]
    assert [(len(call.args[0]), len(call.args[1])) for call in sent.call_args_list] == wanted
    assert flat.view(32, 800).sum(1).tolist() == [800.0 * (number != 5) for number in range(32)]


class UnderWay:
    """Sums that never come."""

    def finish(self) -> None:
        pytest.fail("it waits")


@pytest.mark.usefixtures("alone")
def test_what_is_under_way_keeps_its_memory_when_a_step_is_broken_off() -> None:
    """Others may still write into it; and nobody waits for them, who may have ended."""
    engine = Engine(build_model(SMALL).initialize(1), EngineSettings(), torch.device("cpu"))
    under_way = UnderWay()
    there = weakref.ref(under_way)
    engine.deepspeed.optimizer._exchange._under_way.append(under_way)
    del under_way
    engine.forget_gradients()
    gc.collect()
    assert there() is not None
    assert not engine.deepspeed.optimizer._exchange._under_way
    engine.close()


def test_a_step_that_was_broken_off_leaves_nothing_behind() -> None:
    bucket = bucket_of([2, 3], gathers=True)
    bucket.take(0, torch.full((2,), 7.0))
    bucket.end_pass()
    bucket.take(1, torch.full((3,), 7.0))
    bucket.forget()
    bucket.take(0, torch.ones(2))
    bucket.end_pass()
    bucket.complete()
    assert bucket.sums.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.usefixtures("alone")
def test_other_engines_of_this_process_stay_deepspeeds_own() -> None:
    import deepspeed

    moved("bf16", 0.0)
    assert deepspeed.DeepSpeedEngine.__module__ == "deepspeed.runtime.engine"


@pytest.fixture
def alone() -> Iterator[None]:
    connect(World(), torch.device("cpu"))
    yield
    disconnect()
