"""A trial of a micro-batch: it computes what a step would, finds what fits, and leaves nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.pretraining_reference import SMALL
from torch import Tensor

from pretraining.architectures.declaration import make_shape
from pretraining.data.batches import full_sequences
from pretraining.engine.engine import is_shortage
from pretraining.mesh.mesh import Mesh
from pretraining.planning.memory import Heaviest, find_largest_that_fits, plan_activations
from pretraining.training import micro_batch
from pretraining.training.micro_batch import fits_in_trial, memory_to_reserve

CPU = torch.device("cpu")
HEAVIEST = Heaviest(replace(SMALL, dropout=0.1), "fp32", length=32, predictions=5, recompute=False)


class Kept:
    """Counts the bytes of what is kept for the backward pass, each tensor once."""

    def __init__(self, most: int) -> None:
        self.bytes, self.most, self._seen = 0, most, set[int]()

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._seen:
            self._seen.add(tensor.data_ptr())
            self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes > self.most > 0:
            raise torch.OutOfMemoryError(f"{self.bytes} bytes, and there are {self.most}")
        return tensor


@contextmanager
def memory_of(size: int) -> Iterator[Kept]:
    """A device with so many bytes for what the backward pass needs; 0: as many as are asked for."""
    kept = Kept(size)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        yield kept


def kept_by(heaviest: Heaviest, sequences: int) -> int:
    with memory_of(0) as kept:
        assert fits_in_trial(heaviest, CPU, 0, sequences)
    return kept.bytes


def test_a_share_of_a_model_is_tried_without_the_other_ranks() -> None:
    """It keeps less than a whole one."""
    with memory_of(0) as kept:
        assert fits_in_trial(HEAVIEST, CPU, 0, 3, Mesh(tensor_rank=1, tensor_ranks=2))
    assert 0 < kept.bytes < kept_by(HEAVIEST, 3)


@pytest.mark.parametrize(("dtype", "recompute"), [("fp32", True), ("bf16", False)])
def test_a_trial_finds_the_largest_that_fits(dtype: Any, recompute: bool) -> None:
    heaviest, sizes = replace(HEAVIEST, dtype=dtype, recompute=recompute), [1, 2, 3, 6, 9, 18]
    capacity = kept_by(heaviest, 6)
    assert kept_by(heaviest, 9) > capacity

    def fits(size: int) -> bool:
        with memory_of(capacity):
            return fits_in_trial(heaviest, CPU, 0, size)

    assert find_largest_that_fits(sizes, fits) == 6
    assert (fits(9), fits(6)) == (False, True), "a trial that failed leaves nothing behind"


def test_a_trial_computes_the_heaviest_micro_batch_with_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the random numbers alone."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made, backward = Mock(wraps=full_sequences), Mock(wraps=torch.autograd.backward)
    monkeypatch.setattr(micro_batch, "full_sequences", made)
    monkeypatch.setattr(torch.autograd, "backward", backward)
    assert fits_in_trial(HEAVIEST, CPU, 0, 3)
    assert made.call_args.args[:3] == (3, 32, 5)
    [[[loss], _]] = backward.call_args_list
    assert torch.isfinite(loss)
    assert torch.equal(torch.rand(2), expected)


def test_the_estimate_for_a_cpu_covers_what_is_kept() -> None:
    """It counts what the backward pass makes too, such as the gradient of the logits."""
    shape = replace(SMALL, dropout=0.1, attention_dropout=0.1)
    heaviest = replace(HEAVIEST, shape=shape, length=64, predictions=10)
    kept = kept_by(heaviest, 24) - kept_by(heaviest, 8)
    assert kept < plan_activations(shape, "fp32", 16, 64, fused_attention=False).kept < 1.2 * kept


def test_a_reserve_that_is_not_there_means_that_nothing_fits_and_no_other_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty

    def limited(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8 and size == (10**12,):
            raise torch.OutOfMemoryError("no such reserve")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", limited)
    assert fits_in_trial(HEAVIEST, CPU, 10**9, 1)
    assert not fits_in_trial(HEAVIEST, CPU, 10**12, 1)
    broken = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(micro_batch, "compute_on_copy", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        fits_in_trial(HEAVIEST, CPU, 0, 1)


def test_what_a_shortage_of_memory_looks_like() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    shortages = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), caught.value, cublas
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert [is_shortage(error) for error in (*shortages, illegal)] == [True, True, True, False]


def test_a_trial_leaves_room_for_what_the_engine_will_hold_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned and not held so far, and the margin; nothing less where more is held than planned."""
    monkeypatch.setattr(micro_batch, "read_total_memory", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    device = torch.device("cuda", 0)
    assert [memory_to_reserve(planned, device) for planned in (700.0, 300.0, 100.0)] == [450, 50, 50]


@pytest.mark.gpu
def test_a_gpu_finds_what_fits_and_is_as_before() -> None:
    """In 4 GB, of which the weights and gradients of Base take 0.5."""
    device = torch.device("cuda", 0)
    base = Heaviest(make_shape("base", 30522), "bf16", length=128, predictions=20, recompute=False)
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
    reserve = free - 4 * 10**9
    sizes = [2**power for power in range(12)]
    found = find_largest_that_fits(sizes, lambda size: fits_in_trial(base, device, reserve, size)) or 0
    assert found in (16, 32, 64)
    assert [fits_in_trial(base, device, reserve, size) for size in (2 * found, found)] == [False, True]
    assert torch.cuda.memory_allocated(device) == held
