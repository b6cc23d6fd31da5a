"""Sums of gradients in fixed point: of any order the same, exact, and none wraps around; where shares may end."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.pretraining_reference import SMALL, random_batch
from support.training import run_connected
from torch import Tensor

from pretraining.config.settings import Parallel, Precision
from pretraining.engine import gradients
from pretraining.engine.buckets import make_buckets
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.engine import Engine
from pretraining.engine.fixed_point import (
    ALIGNED,
    FixedBucket,
    LargestGradient,
    add_block_squares,
    find_blocks,
    find_runs,
    lay_out,
)
from pretraining.engine.step import Seeds, train_step
from pretraining.model import cpu_kernels
from pretraining.model.batch import Deal, PretrainingBatches
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.optimizers.steps.flat import BLOCK

CPU = torch.device("cpu")
GRADIENTS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9)


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With our kernels where they can be built, and without."""
    cpu_kernels.allow(request.param)
    yield request.param
    cpu_kernels.allow(True)


Sums = tuple[Tensor, LargestGradient]


def add_all(values: list[float], dtype: torch.dtype = torch.float32, gathers: bool = False) -> Sums:
    """The sums of a table of 2 x 2 and a bias, whose gradients have one value in each backward pass; the table's come
    as rows, of which the second has none, and whole, in turns; always whole if the bucket `gathers`."""
    limit, flat = LargestGradient(CPU), torch.full((40,), 1 << 60)
    limit.addends = len(values)
    (bucket,) = make_buckets(flat, [(2, 2), (1,)], 1, 99, [0, 4 if gathers else ALIGNED], partial(FixedBucket, limit))
    bucket.gathers = gathers
    for turn, value in enumerate(values):
        whole = torch.tensor([[value, value], [0, 0]], dtype=dtype)
        rows = torch.sparse_coo_tensor(torch.tensor([[0]]), whole[:1], (2, 2), check_invariants=True)
        bucket.take(0, rows if turn % 2 and not gathers else whole)
        bucket.take(1, torch.tensor([value], dtype=dtype))
        bucket.end_pass()
    bucket.complete()
    return torch.cat([view.view(-1) for view in bucket.views.values()]), limit


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathers", [False, True])
def test_sums_are_exact_in_any_order(dtype: torch.dtype, gathers: bool) -> None:
    @given(values=GRADIENTS, draw=st.randoms())
    def check(values: list[float], draw: Any) -> None:
        taken = torch.tensor(values).to(dtype).double().tolist()
        wanted = sum(round(value * 2**50) for value in taken)
        sums, limit = add_all(values, dtype, gathers)
        assert sums.tolist() == [wanted, wanted, 0, 0, wanted]
        assert not limit.broken
        draw.shuffle(values)
        assert torch.equal(add_all(values, dtype, gathers)[0], sums)

    check()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("value", [1e-8, 3e-3, 500.0])
def test_the_last_bit_of_a_gradient_counts(value: float) -> None:
    changed = float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))
    sums, others = (add_all([1.0, each, 0.5])[0] for each in (value, changed))
    assert (sums != others).tolist() == [True, True, False, False, True]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_no_sum_wraps_around_without_a_word(count: int) -> None:
    """5,000 + 5,000 would be -6,384."""
    largest = 8190.9 / count
    sums, limit = add_all([largest] * count)
    assert not limit.broken
    assert float(sums[0]) * 2**-50 == pytest.approx(8190.9, rel=1e-6)
    for wrong, told in ((-8192.5 / count, 1), (math.nan, 3), (math.inf, 3), (-math.inf, 3)):
        assert add_all([*[0.0] * (count - 1), wrong])[1].broken == told


@given(sizes=st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=9), ranks=st.integers(1, 9))
def test_no_share_ends_within_a_block(sizes: list[int], ranks: int) -> None:
    layout = lay_out(sizes, ranks)
    share, blocks = layout.total // ranks, find_blocks(layout, sizes)
    assert share * ranks == layout.total
    assert share % BLOCK == 0
    assert layout.total <= sum(sizes) + 2 * BLOCK * (ranks + 1) + ALIGNED * len(sizes)
    assert all(offset % ALIGNED == 0 for offset in layout.offsets)
    each = pairwise(zip(layout.offsets, sizes, strict=True))
    assert all(offset + size <= after for (offset, size), (after, _) in each)
    assert int(blocks[:, 1].sum()) == sum(sizes)
    assert torch.equal(blocks[:, 0] // share, (blocks.sum(1) - 1) // share)


@pytest.mark.usefixtures("kernels")
def test_squares_of_blocks_do_not_depend_on_the_share() -> None:
    flat = torch.randn(5 * BLOCK)
    blocks = torch.tensor([(0, BLOCK), (BLOCK + 64, 77), (2 * BLOCK, BLOCK), (4 * BLOCK, 9000)])
    squares = add_block_squares(flat, blocks, [find_runs(blocks)])
    wanted = [float(flat[at : at + length].double().square().sum()) for at, length in blocks.tolist()]
    assert squares.tolist() == pytest.approx(wanted, rel=1e-14)
    later = blocks[2:] - torch.tensor([2 * BLOCK, 0])
    assert torch.equal(add_block_squares(flat[2 * BLOCK :].clone(), later, [find_runs(later)]), squares[2:])
    assert len(add_block_squares(flat, blocks[:0], [find_runs(blocks[:0])])) == 0, "of a rank whose share has none"


def make_step(factor: float, wire: str) -> tuple[float, bool]:
    """A step in which the last rank's loss has a factor, and this rank fewer micro-batches than others; returns its
    norm, and whether weights moved."""
    if wire == "network":
        vars(gradients)["find_neighbours"] = lambda *_: None
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    settings = EngineSettings(precision=Precision(dtype="fp32"), parallel=Parallel(same_bits=True))
    engine = Engine(build_model(SMALL).initialize(1), settings, CPU)
    before = {name: weight.clone() for name, weight in engine.weights()}
    deal = Deal(rank, ranks, 2 * ranks - 1)
    micro = (random_batch([9, 5, 12], engine.model.shape.vocabulary, at) for at in range(rank, deal.total, ranks))
    batches = PretrainingBatches(tuple(micro), 3 * deal.total, 8 * deal.total, deal=deal)
    own = factor if rank == ranks - 1 else 1.0
    norm = train_step(engine, batches, 1e-3, Seeds(1, 1), lambda *given: MLM.loss(*given) * own).gradient_norm
    moved = any(not torch.equal(weight, before[name]) for name, weight in engine.weights())
    return float(norm or 0), moved


def make_steps() -> list[tuple[float, bool]]:
    return [make_step(factor, wire) for wire in ("memory", "network") for factor in (1.0, 1e7, math.nan)]


def test_a_gradient_that_is_too_large_on_one_rank_moves_no_weight_of_any() -> None:
    for found in run_connected(2, make_steps):
        assert [moved for _, moved in found] == [True, False, False] * 2
        assert [math.isfinite(norm) for norm, _ in found] == [True, False, False] * 2
        assert [norm for norm, _ in found[1::3]] == [math.inf] * 2, "too large"
        assert all(math.isnan(norm) for norm, _ in found[2::3]), "no number"
        assert found[0] == found[3]
