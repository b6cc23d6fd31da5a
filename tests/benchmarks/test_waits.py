"""Waits for a GPU are found and told by their place; here with stand-ins for what CUDA would do."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.waits import SYNCHRONIZING, count, waits_counted


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Pretends a GPU, and records the modes that PyTorch is told to warn in."""
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", told.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return told


def read_number() -> None:
    """As `item` does on a GPU."""
    warnings.warn(SYNCHRONIZING, UserWarning, stacklevel=1)


@pytest.mark.filterwarnings("ignore:called")  # of the steps that warm up
def test_waits_are_counted_by_micro_batch_and_by_step(modes: list[object]) -> None:
    def step(micro: int) -> None:
        torch.cuda.synchronize()
        for _ in range(micro):
            read_number()
            read_number()

    found = count(step)
    assert found["each_micro_batch"] == 2
    assert found["each_step"] == 1
    assert modes == ["warn", 0, "warn", 0]


def test_each_wait_is_told_by_its_line(modes: list[object]) -> None:
    with waits_counted() as places:
        for _ in range(3):
            read_number()
        torch.cuda.synchronize()
    line = inspect.getsourcelines(read_number)[1] + 2
    assert places[f"{__file__}:{line}"] == 3
    assert places.total() == 4
    assert {Path(place.rpartition(":")[0]) for place in places} == {Path(__file__)}


def test_other_warnings_are_no_waits_and_all_is_as_before(modes: list[object]) -> None:
    before = torch.cuda.synchronize
    with waits_counted() as places:
        warnings.warn("something else", stacklevel=1)
    assert not places
    assert torch.cuda.synchronize is before
