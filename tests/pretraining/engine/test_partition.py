"""What flat tensors hold: every element once, whatever the sizes; and layouts that are refused."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.commands import assert_refusal
from support.pretraining_reference import SMALL
from torch import Tensor, nn

from data_prep.common.errors import UserError
from pretraining.engine import partition as partition
from pretraining.engine.partition import find_flat_tensors
from pretraining.model.shape import MATRIX
from pretraining.objectives.declaration import build_model
from pretraining.optimizers.steps.flat import FlatTensor, Slice
from pretraining.optimizers.steps.lamb import make_slot_table

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(sizes=SIZES, ranks=st.integers(1, 9), padding=st.integers(0, 5), data=st.data())
def test_stages_1_and_2_hold_each_element_once(sizes: list[int], ranks: int, padding: int, data: st.DataObject) -> None:
    """Also where a rank holds nothing but padding, and where there is padding between parameters."""
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    offsets, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        offsets.append(end)
        end += size + gap
    share = -(-(end + padding) // ranks)
    whole = torch.full((ranks * share,), -1)
    names = {f"parameter {index}": size for index, size in enumerate(sizes)}
    for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole[offset : offset + size] = 100 * index + torch.arange(size)
    held = {name: [0] * size for name, size in names.items()}
    for rank in range(ranks):
        flat = whole[rank * share : (rank + 1) * share]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
            optimizer = SimpleNamespace(real_dp_process_group=[None])
            found = partition._cut_flat(flat, names, offsets, optimizer, 0)
        for part in found.parts:
            index = int(part.name.split()[1])
            wanted = 100 * index + torch.arange(part.start, part.start + part.length)
            assert torch.equal(found.view_part(part, flat), wanted)
            for element in range(part.start, part.start + part.length):
                held[part.name][element] += 1
    assert all(count == 1 for counts in held.values() for count in counts)


@given(size=st.integers(1, 30), cuts=st.lists(st.integers(0, 90), max_size=6), count=st.sampled_from([1, 3]))
def test_slots_hold_all_once(size: int, cuts: list[int], count: int) -> None:
    """A fused parameter's slots, where parts begin and end anywhere."""
    total = size * count
    ends = sorted({0, total, *(cut % total for cut in cuts)})
    some = [Slice("p", begin, end - begin, 1000 + begin) for begin, end in pairwise(ends)]
    held: dict[int, list[int]] = {slot: [] for slot in range(count)}
    for part in some:  # a rank has one part of a parameter; here each is a rank of its own
        layout = make_slot_table(FlatTensor(torch.empty(0), {"p": total}, (part,)), {"p": MATRIX._replace(parts=count)})
        assert len(layout.slots) == count
        for slot, (offset, length, whole) in zip(layout.places, layout.stretches.tolist(), strict=True):
            held[slot] += range(offset - 1000, offset - 1000 + length)
            assert whole == (length == size)
    assert all(held[slot] == list(range(slot * size, (slot + 1) * size)) for slot in held)


def flat_engine(model: nn.Module, change: Callable[[Tensor], None] = lambda _: None) -> Any:
    """What DeepSpeed looks like under stage 2 with one rank."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    change(flat)
    offsets = [sum(parameter.numel() for parameter in parameters[:index]) for index in range(len(parameters))]
    kind = type("DeepSpeedZeroOptimizer", (), {})
    optimizer = kind()
    optimizer.single_partition_of_fp32_groups = [flat]
    optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets = [parameters], [offsets]
    optimizer.real_dp_process_group = [dist.group.WORLD]
    return SimpleNamespace(optimizer=optimizer)


@pytest.mark.usefixtures("alone")
def test_a_layout_that_is_not_understood_is_refused() -> None:
    model = build_model(SMALL).initialize(1)
    assert len(find_flat_tensors(flat_engine(model), model)) == 1
    engine = flat_engine(model, lambda flat: flat.__setitem__(12345, 1.0))
    assert_refusal(r"of the \d+ elements of [\w.]+, 0 are where they should be", find_flat_tensors, engine, model)
    engine = flat_engine(model)
    engine.optimizer.round_robin_bit16_groups[0].pop()
    engine.optimizer.round_robin_bit16_offsets[0].pop()
    assert_refusal(r"elements of next_head\.bias, 0 are where they should be", find_flat_tensors, engine, model)
    with pytest.raises(UserError, match="its optimizer is SimpleNamespace"):
        find_flat_tensors(SimpleNamespace(optimizer=SimpleNamespace()), model)
