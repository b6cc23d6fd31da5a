"""Ranks of one machine: sums that go through memory, some of them as rows, and weights that lie there once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import run_connected
from torch import Tensor

from pretraining.engine import neighbours
from pretraining.engine.buckets import Bucket, make_buckets
from pretraining.engine.neighbours import find_neighbours
from pretraining.processes.bells import Door
from pretraining.processes.group import wait_for_all

SHAPES = [(30, 4), (7,), (5, 3), (1,), (64,), (6, 2)]
TABLES = (0, 2, 5)
STEPS = range(6)
WHOLE = 10**6
"""a room that holds any sums"""


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
    lambda patched: patched.setattr(neighbours, "system", lambda: "another machine"),
    lambda patched: patched.delattr(os, "memfd_create"),  # a system without such rooms
    lambda patched: patched.setattr(Door, "path", property(lambda _: __file__)),  # leads to a file of somebody else
]
"""Why the last rank may not enter the rooms of others, or they its."""


def on_ranks() -> dict[str, Any]:
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


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_connected(request.param, on_ranks)


@pytest.mark.parametrize("most", [1, WHOLE])
@pytest.mark.parametrize("step", STEPS)
def test_each_rank_has_the_sums_of_its_share(ranks: list[dict[str, Any]], most: int, step: int) -> None:
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
    assert [rank["apart"] for rank in ranks] == [[True] * 3] * len(ranks)
