"""How many runs go at a time: by cores, by memory, by what is left, and by what others leave free."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.finetuning import Toy

from data_prep.common.launchers import World
from data_prep.vocabulary.source import read_vocabulary
from finetuning.inputs import Cutter
from finetuning.session import workers
from finetuning.session.workers import MachineShare, estimate_memory, share_machine
from finetuning.settings import FineTuning
from finetuning.tasks.own import open_own
from finetuning.tasks.task import Setup
from pretraining.model.shape import Shape

CPU = torch.device("cpu")
GB = 1e9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """64 idle cores and 256 GB, and what of them is free now."""
    has = SimpleNamespace(total=256 * GB, free=256 * GB, busy=0.0)
    monkeypatch.setattr(workers, "num_cores", lambda: 64)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(workers, "default_threads", lambda world: 64)
    monkeypatch.setattr(workers, "read_total_memory", lambda device: has.total)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=has.free))
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: has.busy)
    return has


def share(runs: int, left: int | None = None, memory: float = 2 * GB, **search: object) -> MachineShare:
    settings = FineTuning.model_validate({"search": search})
    return share_machine(settings, World(), CPU, runs, runs if left is None else left, memory)


def test_a_machine_is_shared_by_what_runs_need(machine: SimpleNamespace) -> None:
    assert share(36) == MachineShare(36, 1)
    assert share(4) == MachineShare(4, 16)
    assert share(36, memory=16 * GB) == MachineShare(16, 4)  # as many as have room
    assert share(36, memory=600 * GB) == MachineShare(1, 64)  # never none
    assert share(36, jobs=3) == MachineShare(3, 21)  # who says how many decides


def test_what_is_done_left_and_free_changes_no_threads(machine: SimpleNamespace) -> None:
    """They decide a run's bits, and these follow from the command and the machine."""
    assert share(36, left=3) == MachineShare(3, 1)
    assert share(36, left=0) == MachineShare(1, 1)
    machine.free = 20 * GB
    assert share(36) == MachineShare(10, 1)
    machine.busy = 95.0
    assert share(36) == MachineShare(3, 1)
    machine.busy = 100.0
    assert share(4) == MachineShare(1, 16)


def test_ranks_of_a_launcher_make_one_run_at_a_time(machine: SimpleNamespace) -> None:
    world = replace(World(), launcher="torchrun")
    assert share_machine(FineTuning(), world, CPU, 36, 36, 2 * GB) == MachineShare(1, 64)


@pytest.mark.parametrize(("size", "low", "high"), [("tiny", 1.5, 2.0), ("base", 5.0, 9.0), ("large", 12.0, 20.0)])
def test_the_memory_of_a_run_grows_with_its_model(toy: Toy, size: str, low: float, high: float) -> None:
    settings = FineTuning.model_validate({"precision": {"dtype": "fp32"}})
    task = open_own(toy.data / "toy.toml", Setup(Cutter(read_vocabulary(toy.model)), settings))
    assert low * GB < estimate_memory(task, settings, Shape.from_size(size, 30522), CPU) < high * GB
