"""Sums over ranks: each share at its owner, by gloo, by the launches of a pretended NCCL, and through memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.training import run_connected
from torch import Tensor

from pretraining.engine import exchange, neighbours
from pretraining.engine.buckets import Bucket, make_buckets
from pretraining.engine.exchange import Joining
from pretraining.engine.neighbours import SharedFile, find_neighbours
from pretraining.processes.group import wait_for_all

SIZES = [30, 7, 1, 64, 12, 5]
WHOLE = 10**6
"""a bucket that holds any flat tensor, and a room that holds any sums"""


@contextmanager
def pretended_nccl() -> Iterator[list[str]]:
    """Joining finds NCCL, whose launches are listed, while gloo does the work."""
    launches, works = list[str](), list[Any]()

    def count(name: str, operation: Any) -> Any:
        def launch(*args: Any, **more: Any) -> Any:
            launches.append(name)
            works.append(operation(*args, **more))
            return works[-1]

        return launch

    @contextmanager
    def launch_together(group: Any, device: torch.device, async_ops: bool) -> Iterator[Any]:
        assert async_ops, "the next bucket would wait for this one"
        begin, own = len(launches), list[Any]()
        works.clear()
        yield mock.Mock(wait=lambda: [work.wait() for work in own])
        launches[begin:], own[:] = ["group"], works

    with (
        mock.patch.object(exchange, "launches_together", return_value=True),
        mock.patch.object(exchange, "_coalescing_manager", launch_together),
        mock.patch.object(dist, "reduce", count("reduce", dist.reduce)),
        mock.patch.object(exchange, "reduce_scatter", count("reduce-scatter", exchange.reduce_scatter)),
    ):
        yield launches


def joined(limit: int, wire: torch.dtype) -> Tensor:
    """This rank's share of the sums of all ranks, where rank r has r + 1 times 0, 1, 2 and so on."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = -(-sum(SIZES) // ranks) + 1  # more than the parameters fill
    flat = torch.zeros(ranks * share)
    flat[: sum(SIZES)] = torch.arange(sum(SIZES)) * (rank + 1.0)
    going = [
        Joining(each.sums, each.shares, wire, None)
        for each in make_buckets(flat, [(size,) for size in SIZES], ranks, limit)
    ]
    for each in going:
        each.finish()
    return flat[rank * share : (rank + 1) * share]


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {"gloo": joined(40, torch.float32)}
    for limit in (40, WHOLE):
        for wire in (torch.float32, torch.bfloat16):
            with pretended_nccl() as launches:
                found[f"{limit} {wire}"] = joined(limit, wire)
            found[f"launches {limit}"] = launches
    return found | sum_through_memory()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_connected(request.param, on_ranks)


@pytest.mark.parametrize("limit", [40, WHOLE])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_each_rank_has_the_sums_of_its_share(ranks: list[dict[str, Any]], limit: int, wire: torch.dtype) -> None:
    wanted = torch.arange(sum(SIZES)) * sum(range(1, len(ranks) + 1))
    for way in ("gloo", f"{limit} {wire}"):
        found = torch.cat([rank[way] for rank in ranks])
        exact = way == "gloo" or wire == torch.float32
        torch.testing.assert_close(found[: len(wanted)], wanted.float(), rtol=0 if exact else 0.01, atol=0)
        assert not found[len(wanted) :].any()


def test_a_whole_flat_tensor_is_one_reduce_scatter(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert (found[f"launches {WHOLE}"], found["launches 40"]) == (["reduce-scatter"], ["group"] * 3)


SHAPES = [(30, 4), (7,), (5, 3), (1,), (64,), (6, 2)]
TABLES = (0, 2, 5)
STEPS = range(6)


def gradients_of(rank: int, step: int) -> Iterator[tuple[int, Tensor]]:
    """What a rank adds in a step: some tables by rows, of which two passes may name the same, some whole, some not."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    for _ in range(2):
        for number, shape in enumerate(SHAPES):
            kind = int(torch.randint(4, (), generator=draw))
            gradient = torch.randint(-9, 10, shape, generator=draw).float()
            if number in TABLES and kind < 3:
                rows = torch.randperm(shape[0], generator=draw)[: kind * 2]
                yield number, torch.sparse_coo_tensor(rows[None], gradient[rows], shape, check_invariants=True)
            elif kind:
                yield number, gradient


def wanted_sums(step: int, ranks: int) -> Tensor:
    sums = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(ranks):
        for number, gradient in gradients_of(rank, step):
            sums[number] += gradient
    return torch.cat([each.view(-1) for each in sums])


def added(buckets: list[Bucket], step: int) -> None:
    """Fills the buckets with this rank's gradients of a step."""
    of = {number: bucket for bucket in buckets for number in bucket.views}
    for bucket in buckets:
        bucket.forget()
    for number, gradient in gradients_of(dist.get_rank(), step):
        if number in of[number].came:
            of[number].end_pass()
        of[number].take(number, gradient)
    for bucket in buckets:
        bucket.end_pass()
        bucket.complete()


HINDRANCES: list[Callable[[pytest.MonkeyPatch], None]] = [
    lambda patched: patched.setattr(neighbours, "BOOT", Path("/proc/sys/kernel/random/uuid")),  # another machine
    lambda patched: patched.setattr(neighbours, "BOOT", Path("/proc/nowhere")),
    # leads to a file of somebody else
    lambda patched: patched.setattr(SharedFile, "path", property(lambda _: __file__)),
    lambda patched: patched.setattr(SharedFile, "path", property(lambda _: "/proc/1/fd/99999")),
]
"""Why the last rank may not enter the rooms of others, or they its."""


def sum_through_memory() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
    share = -(-sum(map(torch.numel, parameters)) // ranks) + 1
    found: dict[str, Any] = {}
    for most in (1, WHOLE):  # the longest parameter alone, or all at once
        near, flat = find_neighbours(parameters, most), torch.full((ranks * share,), 1000.0)
        assert near is not None
        buckets = list(make_buckets(flat, SHAPES, ranks, 40))
        for step in STEPS:
            added(buckets, step)
            near.join(buckets)
            wait_for_all()  # as when they measure the norm together
            found[f"{most} {step}"] = flat[rank * share : (rank + 1) * share].clone()
            own = [(bucket, each) for bucket in buckets for each in bucket.shares if each.owner == rank]
            found[f"squares {most} {step}"] = sum(float(bucket.squares(each)) for bucket, each in own)
    assert near is not None
    common = near.place(torch.full((10,), float(rank), dtype=torch.bfloat16))
    common[rank] = 10 + rank
    wait_for_all()
    found["weights"] = common.tolist()
    found["apart"] = []
    for hinder in HINDRANCES:
        with pytest.MonkeyPatch.context() as patched:
            if rank == ranks - 1:
                hinder(patched)
            found["apart"].append(find_neighbours(parameters, 1) is None)
    return found


@pytest.mark.parametrize("most", [1, WHOLE])
@pytest.mark.parametrize("step", STEPS)
def test_sums_through_memory_are_those_of_the_gradients(ranks: list[dict[str, Any]], most: int, step: int) -> None:
    """Whatever came as rows and whatever whole, and whatever was there in the step before."""
    wanted = wanted_sums(step, len(ranks))
    found = torch.cat([rank[f"{most} {step}"] for rank in ranks])
    assert torch.equal(found[: len(wanted)], wanted)
    assert sum(rank[f"squares {most} {step}"] for rank in ranks) == pytest.approx(
        float(wanted.square().sum()), rel=1e-6
    )


def test_the_weights_of_rank_0_are_those_of_all(ranks: list[dict[str, Any]]) -> None:
    """And what a rank writes, all have."""
    wanted = [10.0 + rank for rank in range(len(ranks))] + [0.0] * (10 - len(ranks))
    assert [rank["weights"] for rank in ranks] == [wanted] * len(ranks)


def test_where_one_cannot_enter_none_does(ranks: list[dict[str, Any]]) -> None:
    assert [rank["apart"] for rank in ranks] == [[True] * len(HINDRANCES)] * len(ranks)
