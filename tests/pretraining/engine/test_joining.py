"""Sums over ranks: each share at its owner, by reductions of gloo and by the launches of a pretended NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.training import run_connected
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from pretraining.engine import exchange
from pretraining.engine.buckets import make_buckets
from pretraining.engine.exchange import Joining

SIZES = [30, 7, 1, 64, 12, 5]
SHAPES = [(size,) for size in SIZES]
WHOLE = 10**6
"""a bucket that holds any flat tensor"""


class Launches:
    """Counts what NCCL would be given, while gloo or nobody does the work."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._inside = False
        self._works: list[Any] = []

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """Within this, joining finds NCCL."""
        with (
            mock.patch.object(exchange, "launches_together", return_value=True),
            mock.patch.object(exchange, "_coalescing_manager", self._together),
            mock.patch.object(dist, "reduce", self._counted("reduce", dist.reduce)),
            mock.patch.object(exchange, "reduce_scatter", self._counted("reduce-scatter", exchange.reduce_scatter)),
        ):
            yield

    def _counted(self, name: str, operation: Any) -> Any:
        def launch(*args: Any, **more: Any) -> Any:
            if self._inside:
                self._works.append(operation(*args, **more))
                return None
            self.names.append(name)
            return operation(*args, **more)

        return launch

    @contextmanager
    def _together(self, group: Any, device: torch.device, async_ops: bool) -> Iterator[Any]:
        assert async_ops, "the next bucket would wait for this one"
        self.names.append("group")
        self._inside, self._works = True, []
        works = self._works  # of this bucket: the next one gets a list of its own before anybody waits
        yield mock.Mock(wait=lambda: [work.wait() for work in works])
        self._inside = False


def joined(limit: int, wire: torch.dtype) -> Tensor:
    """This rank's share of the sums of all ranks, where rank r has r + 1 times 0, 1, 2 and so on."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = -(-sum(SIZES) // ranks) + 1  # more than the parameters fill
    flat = torch.zeros(ranks * share)
    flat[: sum(SIZES)] = torch.arange(sum(SIZES)) * (rank + 1.0)
    going = [Joining(each.sums, each.shares, wire, None) for each in make_buckets(flat, SHAPES, ranks, limit)]
    for each in going:
        each.finish()
    return flat[rank * share : (rank + 1) * share]


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {"gloo": joined(40, torch.float32)}
    for limit in (40, WHOLE):
        for wire in (torch.float32, torch.bfloat16):
            launches = Launches()
            with launches.pretended():
                found[f"{limit} {wire}"] = joined(limit, wire)
            found[f"launches {limit}"] = launches.names
    return found


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
        assert found[f"launches {WHOLE}"] == ["reduce-scatter"]
        assert found["launches 40"] == ["group"] * 3


@pytest.mark.parametrize("count", [8, 64, 1024])
def test_launches_do_not_depend_on_the_ranks(count: int) -> None:
    """Parameters of a large model with a thousandth of the elements, in as many buckets as it has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = [31_254, 512, *[12_583] * 24]
    flat = torch.zeros(-(-sum(sizes) // count) * count)
    dist.init_process_group("fake", rank=3, world_size=count, store=FakeStore())
    try:
        with (
            mock.patch.object(exchange, "launches_together", return_value=True),
            mock.patch.object(exchange, "_coalescing_manager", wraps=_coalescing_manager) as together,
        ):
            for bucket in make_buckets(flat, [(size,) for size in sizes], count, 16_777):
                Joining(bucket.sums, bucket.shares, torch.float32, None).finish()
    finally:
        dist.destroy_process_group()
    assert together.call_count == 25
