"""What is told where ranks compute in different ways, or have more threads than cores."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep.common.capacity import num_cores
from data_prep.common.launchers import World
from pretraining.checkpoint import loop

ONE: Any = SimpleNamespace(world=World())


def test_ranks_that_round_otherwise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "gather", lambda own: ["tiles", "lanes"])
    with pytest.warns(UserWarning, match=r"ranks compute in different ways \(lanes, tiles\): they round otherwise$"):
        loop.tell_of_cpus(ONE)
    monkeypatch.setattr(loop, "gather", lambda own: ["no kernels", "lanes"])
    with pytest.warns(UserWarning, match="they round otherwise, and draw other masks of dropout"):
        loop.tell_of_cpus(ONE)


def test_more_threads_than_cores_are_told() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_cores())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop.tell_of_cpus(ONE)
        torch.set_num_threads(num_cores() + 1)
        with pytest.warns(UserWarning, match=rf"{num_cores() + 1} threads on {num_cores()} cores: they wait"):
            loop.tell_of_cpus(ONE)
    finally:
        torch.set_num_threads(before)
