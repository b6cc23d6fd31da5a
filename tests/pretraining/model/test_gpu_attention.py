"""Our attention for GPUs against a softmax in fp64 and against the kernels for CPUs, whose masks of dropout it draws.

Where there is a GPU, it runs there; elsewhere Triton's interpreter runs it in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention import NONE, attend_plainly, furthest, gradients, inputs
from support.marks import has_gpu, slow
from support.pretraining_reference import random_batch
from torch import Tensor

from pretraining.model import attention, cpu_kernels, gpu_layouts
from pretraining.model import gpu_operations as gpu
from pretraining.model.attention import Grouped, lay_out
from pretraining.model.dropout import Dropout
from pretraining.model.gpu_layouts import Own, Packed

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu] if has_gpu() else []
DEVICE = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
SIGHTS = [(False, None), (True, None), (False, 20), (True, 20)]
LENGTHS = {"short": [1, 7, 16, 17], "a tile": [64, 63, 65], "tiles": [130, 3, 200]}
FEW = [each if each == "a tile" or has_gpu() else slow(each) for each in LENGTHS]
"""The others are slow in the interpreter."""


@pytest.fixture(autouse=True, scope="module")
def rounding() -> Iterator[None]:
    from support.triton_interpreter import rounding_as_gpus_do

    with nullcontext() if has_gpu() else rounding_as_gpus_do():
        yield


def some_dropout(pieces: int, probability: float = 0.1) -> Dropout:
    """Of a rank whose heads are not the first of all."""
    keys = torch.randint(-(2**31), 2**31 - 1, (pieces,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    return Dropout(probability, keys, site=3, first_head=5)


def on_device(dropout: Dropout) -> Dropout:
    return Dropout(dropout.probability, dropout.keys.to(DEVICE), dropout.site, first_head=dropout.first_head)


def by_own(
    lengths: list[int], qkv: Tensor, bias: Tensor | None, heads: int, sight: Any, dropout: Dropout = NONE
) -> list[Tensor]:
    """What our kernels make of queries, keys and values, and the gradients of these and of their bias."""
    one_way, window, *first = sight
    starts = random_batch(lengths, 50).starts.to(DEVICE)
    layout = Own(starts, max(lengths), len(lengths) if one_way else sum(first), window)
    leaves = [each.detach().to(DEVICE).requires_grad_() for each in (qkv, bias) if each is not None]
    sums = leaves[0] if bias is None else leaves[0] + leaves[1].detach()
    attend = layout.attends_sums(sums)
    out = attend(sums, leaves[1] if leaves[1:] else None, heads, on_device(dropout))
    weight = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    return [each.detach().cpu() for each in (out, *torch.autograd.grad((out * weight).sum(), leaves))]


def same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    """The gradient of the bias is a sum of all rows, which nearly cancel."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
    assert furthest(ours[:2], theirs[:2]) < tolerance
    if len(theirs) > 2:
        rows = float(theirs[1].abs().sum(0).max())
        assert float((ours[2] - theirs[2]).abs().max()) < tolerance / 5 * max(5, rows)


@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("sight", SIGHTS)
def test_it_is_a_softmax_over_what_each_piece_sees(lengths: str, sight: tuple[bool, int | None]) -> None:
    rows, heads, size = LENGTHS[lengths], 1 if lengths == "tiles" else 2, 64 if lengths == "short" else 32
    qkv, bias = inputs(sum(rows), heads * size)
    wanted = attend_plainly(random_batch(rows, 50), qkv, bias, heads, *sight)
    same(by_own(rows, qkv, bias, heads, sight), [wanted.detach(), *gradients(wanted, qkv, bias)])


def test_heads_of_128_numbers_and_sums_without_a_bias() -> None:
    rows = [5, 130]
    qkv, bias = inputs(135, 128)
    wanted = attend_plainly(random_batch(rows, 50), qkv, bias * 0, 1)
    same(by_own(rows, qkv, None, 1, (False, None)), [wanted.detach(), *gradients(wanted, qkv)])


def test_a_bias_may_be_added_first() -> None:
    qkv, bias = (each.to(DEVICE) for each in inputs(9, 64))
    own = Own(torch.tensor([0, 9], dtype=torch.int32, device=DEVICE), 9)
    assert torch.equal(own.attend(qkv, bias, 2, NONE), own.attends_sums(qkv)(qkv + bias, bias, 2, NONE))


def by_cpu(rows: list[int], qkv: Tensor, bias: Tensor, heads: int, sight: Any, dropout: Dropout) -> list[Tensor]:
    """The same by our kernels for CPUs."""
    batch = random_batch(rows, 50)
    out = Grouped(batch.starts, batch.lengths, *sight).attend(qkv * 1, bias, heads, dropout)
    return [out.detach(), *gradients(out, qkv, bias)]


@pytest.mark.kernels
@pytest.mark.parametrize("lengths", FEW)
@pytest.mark.parametrize("sight", [*SIGHTS, (False, None, 1), (False, 20, 2)])
def test_with_dropout_it_is_that_of_a_cpu(lengths: str, sight: Any) -> None:
    """Also where a piece sees one way in the first sequences alone."""
    rows, heads = LENGTHS[lengths], 1 if lengths == "tiles" else 2
    qkv, bias = inputs(sum(rows), heads * 32)
    dropout = some_dropout(sum(rows))
    same(by_own(rows, qkv, bias, heads, sight, dropout), by_cpu(rows, qkv, bias, heads, sight, dropout))


@pytest.mark.kernels
@pytest.mark.parametrize("sight", [slow((False, None)), (True, 20)])
def test_masks_are_those_of_a_cpu_bit_for_bit(sight: tuple[bool, int | None]) -> None:
    """And go backward as they went forward. All pieces weigh the same; values of 1 at one place in one column show
    which pieces kept it, and so does the gradient of values, by slopes of 1 at one place."""
    rows, heads = [130, 17], 2
    batch, dropout = random_batch(rows, 50), some_dropout(147, 0.4)
    seen = 0
    for offset in range(0, 130, 32):
        ones = torch.zeros(147, heads, 32)
        for begin, length in ((0, 130), (130, 17)):
            places = torch.arange(min(offset, length), min(offset + 32, length))
            ones[begin + places, :, places - offset] = 1
        qkv = torch.cat([torch.zeros(147, 128), ones.flatten(1)], 1).requires_grad_()
        kept = []
        own = Own(batch.starts.to(DEVICE), 130, 2 * sight[0], sight[1])
        for layout, on, drops in (
            (Grouped(batch.starts, batch.lengths, *sight), torch.device("cpu"), dropout),
            (own, DEVICE, on_device(dropout)),
        ):
            out = layout.attend(qkv.to(on) * 1, None, heads, drops)
            (slope,) = torch.autograd.grad(out, qkv, ones.flatten(1).to(on))
            kept.append([out.detach().cpu() > 0, slope[:, 128:] > 0])
        for theirs, ours in zip(*kept, strict=True):
            assert torch.equal(ours, theirs)
            seen += int(ours.sum())
    assert seen > 1000


def test_a_sequence_depends_on_no_other() -> None:
    """Bit for bit, with dropout, whatever the longest of the batch is within a tile."""
    rows = [40, 100, 9]
    (qkv, bias), dropout = inputs(149, 64), some_dropout(149)
    together = by_own(rows, qkv, bias, 2, (False, None), dropout)[0]
    alone = Dropout(0.1, dropout.keys[40:140], 3, first_head=5)
    assert torch.equal(by_own([100], qkv[40:140], bias, 2, (False, None), alone)[0], together[40:140])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_errs_by_rounding(dtype: torch.dtype) -> None:
    rows = [150, 20]
    qkv, bias = inputs(170, 32, dtype)
    wanted = attend_plainly(random_batch(rows, 50), qkv, bias, 1)
    exact = [wanted.detach(), *gradients(wanted, qkv, bias)]
    for one, other in zip(by_own(rows, qkv, bias, 1, (False, None)), exact, strict=True):
        assert float((one.double() - other).norm() / other.double().norm()) < 2 * torch.finfo(dtype).eps


def test_what_is_no_number_stays_visible_and_in_its_sequence() -> None:
    (qkv, bias), bad = inputs(73, 32), []
    for part in range(3):
        poisoned = qkv.detach().clone()
        poisoned[5, 32 * part] = torch.nan
        bad.append(by_own([33, 40], poisoned, bias, 1, (False, None))[:2])
    for out, grad in bad:
        assert not out[5].isfinite().all()
        assert not grad[5].isfinite().all()
        assert out[33:].isfinite().all()
        assert grad[33:].isfinite().all()


def widen_window(where: Any, first_head: int) -> tuple[Any, int]:
    return (*where[:3], where[3] + 1), first_head


def look_ahead(where: Any, first_head: int) -> tuple[Any, int]:
    return (*where[:2], where[2] - 1, where[3]), first_head


def take_another_head(where: Any, first_head: int) -> tuple[Any, int]:
    return where, first_head + 1


@pytest.mark.kernels
@pytest.mark.parametrize("fault", [widen_window, look_ahead, take_another_head, None])
def test_faults_of_the_backward_pass_are_found(
    fault: Callable[[Any, int], tuple[Any, int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what it sees, in its masks, and where sums of queries' gradients are forgotten between tiles of keys."""
    from pretraining.model import gpu_attention, gpu_kernels

    backward, launch = gpu_attention.attend_backward, gpu_kernels._launch

    def misled(heads: int, where: Any, drops: Any, first_head: int, *others: Any) -> Any:
        where, first_head = (where, first_head) if fault is None else fault(where, first_head)
        return backward(heads, where, drops, first_head, *others)

    def forgetful(*given: Any, **constants: Any) -> None:
        launch(*given, **constants | ({"halts": False} if "halts" in constants and fault is None else {}))

    rows, sight, dropout = [150], (True, 140), some_dropout(150)
    qkv, bias = inputs(150, 32)
    wanted = by_cpu(rows, qkv, bias, 1, sight, dropout)
    same(by_own(rows, qkv, bias, 1, sight, dropout), wanted)
    monkeypatch.setattr(gpu_attention, "attend_backward", misled)
    monkeypatch.setattr(gpu_kernels, "_launch", forgetful)
    found = by_own(rows, qkv, bias, 1, sight, dropout)
    assert furthest(found[:1], wanted[:1]) < 1e-5
    assert furthest(found[1:2], wanted[1:2]) > 1e-4


@pytest.mark.skipif(has_gpu(), reason="the interpreter counts")
def test_each_tensor_is_moved_once() -> None:
    """In sizes of hidden states: forward, queries, keys, values and the result; backward, these and the slope, and
    three gradients. The flash kernels and `join` move some 20 backward, by reckoning: they also add up queries'
    gradients in fp32."""
    from support.triton_interpreter import Traffic

    qkv, bias = inputs(128, 64, torch.bfloat16)
    with Traffic() as traffic:
        by_own([128], qkv, bias, 2, (False, None), some_dropout(128))
    assert 4 + 8 <= traffic.bytes / (2 * 128 * 64) < 13, "and keys of rows, and sums"


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Tensors of the host take the way of those on a GPU, where these kernels of attention are chosen."""
    monkeypatch.setattr(cpu_kernels, "usable", lambda _: False)
    monkeypatch.setattr(gpu, "usable", lambda *_: True)
    for module in (attention, gpu_layouts):
        monkeypatch.setattr(module, "has_flash", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu_layouts, "_choice", choice)


def chosen(length: int, size: int = 64, compiled: bool = False) -> type:
    states = torch.empty(length, 2 * size, dtype=torch.bfloat16)
    starts = torch.tensor([0, length], dtype=torch.int32)
    return type(lay_out(starts, (length,), states, 2, compiled))


def test_it_attends_where_it_is_asked_for_and_can(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, "own")
    assert chosen(512) is Own
    assert {chosen(513), chosen(512, size=96), chosen(512, compiled=True)} == {Packed}
    monkeypatch.setattr(gpu, "usable", lambda *_: False)
    assert chosen(512) is Packed


@pytest.mark.parametrize("choice", ["auto", "flash"])
def test_by_default_it_does_not_attend(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    as_on_a_gpu(monkeypatch, choice)
    assert chosen(1) is Packed


def test_where_it_cannot_attend_its_needs_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, "own")
    states = torch.empty(1, 128)
    assert gpu_layouts.note_choice(states, 1, 513) == "", "a CPU draws the same masks anyway"
    on_gpu: Any = SimpleNamespace(is_cuda=True, shape=states.shape)
    told = 'compute.attention = "own": needs heads of 32, 64, 128 numbers, at most 512 pieces, 16 bits, Triton, and'
    assert gpu_layouts.note_choice(on_gpu, 1, 513).startswith(told)
    monkeypatch.setattr(gpu_layouts, "_choice", "auto")
    assert gpu_layouts.note_choice(on_gpu, 1, 513) == "", "nobody has asked for it"
