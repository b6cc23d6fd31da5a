"""Our attention for GPUs against a softmax in fp64 and against the kernels for CPUs, whose masks of dropout it draws.

Where there is a GPU, it runs there; elsewhere Triton's interpreter runs it in Python.
"""

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention import assert_attends, attend_plainly, inputs, with_slopes
from support.marks import has_gpu, slow
from support.operations import DEVICE, NONE, ON_DEVICE, place, rounding
from support.pretraining_reference import random_batch
from torch import Tensor

from pretraining.model import attention, cpu_kernels, gpu_layouts
from pretraining.model import gpu_operations as gpu
from pretraining.model.attention import Grouped, lay_out
from pretraining.model.dropout import Dropout
from pretraining.model.gpu_layouts import Own, Packed

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = ON_DEVICE
LENGTHS = {"short": [1, 7, 16, 17], "a tile": [64, 63, 65], "tiles": [130, 3, 200]}
FEW = [each if each == "a tile" or has_gpu() else slow(each) for each in LENGTHS]
"""The others are slow in the interpreter."""


@pytest.fixture(autouse=True, scope="module")
def as_gpus_do() -> Iterator[None]:
    with rounding():
        yield


def some_dropout(pieces: int, probability: float = 0.1) -> Dropout:
    """Of a rank whose heads are not the first of all."""
    keys = torch.randint(-(2**31), 2**31 - 1, (pieces,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    return Dropout(probability, keys, site=3, first_head=5)


def by_own(
    lengths: list[int],
    qkv: Tensor,
    bias: Tensor | None,
    heads: int,
    sight: Any = (False, None),
    dropout: Dropout = NONE,
) -> list[Tensor]:
    """What our kernels make of queries, keys and values, and the gradients of these and of their bias."""
    one_way, window, *first = sight
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    layout = Own(starts, max(lengths), len(lengths) if one_way else sum(first), window)
    leaves = [each.detach().to(DEVICE).requires_grad_() for each in (qkv, bias) if each is not None]
    sums = leaves[0] if bias is None else leaves[0] + leaves[1].detach()
    attend = layout.attends_sums(sums)
    return with_slopes(attend(sums, leaves[1] if leaves[1:] else None, heads, place(dropout, DEVICE)), *leaves)


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert_attends(ours, theirs, of_sum=2e-6, tolerance=1e-5)


@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("sight", [(False, None), (True, 20), (False, 20, 2)])
def test_it_is_a_softmax_over_what_each_piece_sees(lengths: str, sight: Any) -> None:
    """Also where a piece sees one way in the first sequences alone."""
    rows, heads, size = LENGTHS[lengths], 1 if lengths == "tiles" else 2, 64 if lengths == "short" else 32
    qkv, bias = inputs(sum(rows), heads * size)
    same(by_own(rows, qkv, bias, heads, sight), attend_plainly(random_batch(rows, 50), qkv, bias, heads, *sight))


def test_heads_of_128_numbers_and_sums_without_a_bias() -> None:
    rows = [5, 70]
    qkv, bias = inputs(75, 128)
    same(by_own(rows, qkv, None, 1), attend_plainly(random_batch(rows, 50), qkv, bias * 0, 1)[:2])


MIXED = [[0, 1, 31, 32, 33], [98, 0, 127, 128], [129, 0], [512]]


@pytest.mark.parametrize("rows", [[0, 2, 0, 66, 0], *map(slow, MIXED)])
def test_all_is_written_also_around_empty_sequences(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody writes would be NaN here."""
    empty: Any = torch.Tensor.new_empty

    def poisoned(*given: Any, **named: Any) -> Tensor:
        made: Tensor = empty(*given, **named)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    qkv, bias = inputs(sum(rows), 32)
    wanted = attend_plainly(random_batch([each for each in rows if each], 50), qkv, bias, 1)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    same(by_own(rows, qkv, bias, 1), wanted)


def test_a_bias_may_be_added_first() -> None:
    qkv, bias = (each.to(DEVICE) for each in inputs(9, 64))
    own = Own(torch.tensor([0, 9], dtype=torch.int32, device=DEVICE), 9)
    assert torch.equal(own.attend(qkv, bias, 2, NONE), own.attends_sums(qkv)(qkv + bias, bias, 2, NONE))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rows", "sight"),
    [
        ([64, 63, 65], (False, None, 1)),
        ([150], (True, 140)),
        *(slow(LENGTHS[each], sight) for each in LENGTHS for sight in [(False, None), (True, None), (False, 20)]),
    ],
)
def test_with_dropout_it_is_that_of_a_cpu(rows: list[int], sight: Any) -> None:
    """Forward and backward, over one tile of keys or several."""
    heads = 1 if max(rows) > 128 else 2
    (qkv, bias), dropout, batch = inputs(sum(rows), heads * 32), some_dropout(sum(rows)), random_batch(rows, 50)
    by_cpu = with_slopes(Grouped(batch.starts, batch.lengths, *sight).attend(qkv * 1, bias, heads, dropout), qkv, bias)
    same(by_own(rows, qkv, bias, heads, sight, dropout), by_cpu)


@pytest.mark.kernels
@pytest.mark.parametrize(("longest", "sight"), [(70, (True, 20)), slow(130, (False, None)), slow(130, (True, 20))])
def test_masks_are_those_of_a_cpu_bit_for_bit(longest: int, sight: tuple[bool, int | None]) -> None:
    """And go backward as they went forward. All pieces weigh the same; values of 1 at one place in one column show
    which pieces kept it, and so does the gradient of values, by slopes of 1 at one place."""
    pieces, heads, seen = longest + 17, 2, 0
    batch, dropout = random_batch([longest, 17], 50), some_dropout(pieces, 0.4)
    for offset in range(0, longest, 32):
        ones = torch.zeros(pieces, heads, 32)
        for begin, length in ((0, longest), (longest, 17)):
            places = torch.arange(min(offset, length), min(offset + 32, length))
            ones[begin + places, :, places - offset] = 1
        qkv = torch.cat([torch.zeros(pieces, 128), ones.flatten(1)], 1).requires_grad_()
        kept = []
        own = Own(batch.starts.to(DEVICE), longest, 2 * sight[0], sight[1])
        for layout, on in ((Grouped(batch.starts, batch.lengths, *sight), torch.device("cpu")), (own, DEVICE)):
            out = layout.attend(qkv.to(on) * 1, None, heads, place(dropout, on))
            (slope,) = torch.autograd.grad(out, qkv, ones.flatten(1).to(on))
            kept.append([out.detach().cpu() > 0, slope[:, 128:] > 0])
        for theirs, ours in zip(*kept, strict=True):
            assert torch.equal(ours, theirs)
            seen += int(ours.sum())
    assert seen > 1000


def test_a_sequence_depends_on_no_other() -> None:
    """Bit for bit, with dropout, whatever the longest of the batch is within a tile."""
    rows = [40, 70, 9]
    (qkv, bias), dropout = inputs(119, 64), some_dropout(119)
    together = by_own(rows, qkv, bias, 2, dropout=dropout)[0]
    alone = Dropout(0.1, dropout.keys[40:110], 3, first_head=5)
    assert torch.equal(by_own([70], qkv[40:110], bias, 2, dropout=alone)[0], together[40:110])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_errs_by_rounding(dtype: torch.dtype) -> None:
    rows = [150, 20]
    qkv, bias = inputs(170, 32, dtype)
    exact = attend_plainly(random_batch(rows, 50), qkv, bias, 1)
    for one, other in zip(by_own(rows, qkv, bias, 1), exact, strict=True):
        assert float((one.double() - other).norm() / other.double().norm()) < 2 * torch.finfo(dtype).eps


def test_what_is_no_number_stays_visible_and_in_its_sequence() -> None:
    qkv, bias = inputs(73, 32)
    for part in range(3):
        poisoned = qkv.detach().clone()
        poisoned[5, 32 * part] = torch.nan
        for each in by_own([33, 40], poisoned, bias, 1)[:2]:
            assert not each[5].isfinite().all()
            assert each[33:].isfinite().all()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host take the way of those on a GPU."""
    monkeypatch.setattr(cpu_kernels, "usable", lambda _: False)
    monkeypatch.setattr(gpu, "usable", lambda *_: True)
    for module in (attention, gpu_layouts):
        monkeypatch.setattr(module, "has_flash", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("choice", "length", "size", "layout"),
    [
        ("own", 512, 64, Own),
        ("own", 513, 64, Packed),
        ("own", 512, 96, Packed),
        ("auto", 1, 64, Packed),
        ("flash", 1, 64, Packed),
    ],
)
def test_it_attends_where_it_is_asked_for_and_can(
    choice: str, length: int, size: int, layout: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_layouts, "_choice", choice)
    starts, states = torch.tensor([0, length], dtype=torch.int32), torch.empty(length, 2 * size).bfloat16()
    assert type(lay_out(starts, (length,), states, 2)) is layout
    monkeypatch.setattr(gpu, "usable", lambda *_: False)
    assert type(lay_out(starts, (length,), states, 2)) is Packed


@pytest.mark.usefixtures("on_a_gpu")
def test_where_it_cannot_attend_its_needs_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layouts, "_choice", "own")
    states = torch.empty(1, 128)
    assert gpu_layouts.note_choice(states, 1, 513) == "", "a CPU draws the same masks anyway"
    on_gpu: Any = SimpleNamespace(is_cuda=True, shape=states.shape)
    assert "needs heads of 32, 64, 128 numbers, at most 512 pieces" in gpu_layouts.note_choice(on_gpu, 1, 513)
    monkeypatch.setattr(gpu_layouts, "_choice", "auto")
    assert gpu_layouts.note_choice(on_gpu, 1, 513) == "", "nobody has asked for it"
