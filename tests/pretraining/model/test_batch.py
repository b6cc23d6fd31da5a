"""Batches move to a device whole."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from support.pretraining_reference import random_batch


def test_batches_are_on_the_device_that_is_asked_for() -> None:
    batch = random_batch([9, 4, 30], 101)
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert all(getattr(moved, field.name).is_meta for field in fields(batch) if field.type == "Tensor")
    assert moved.lengths == batch.lengths


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_arrive_whole_on_a_gpu() -> None:
    for seed in range(20):  # the pinned memory of one is used again for the next
        batch = random_batch([64] * 48, 101, seed)
        moved = batch.to("cuda")
        assert moved.pieces.is_cuda
        for field in fields(batch):
            if field.type == "Tensor":
                assert torch.equal(getattr(moved, field.name).cpu(), getattr(batch, field.name))
