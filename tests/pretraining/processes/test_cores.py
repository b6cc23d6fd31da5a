"""Ranks stay on the cores next to their GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.processes import cores
from pretraining.processes.cores import keep_near, read_cores

GPU = torch.device("cuda", 1)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), max_size=5))
def test_lists_of_cores_are_read(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else str(first) for first, more in ranges)
    assert read_cores(text + "\n") == {core for first, more in ranges for core in range(first, first + more + 1)}


@pytest.mark.parametrize(
    ("near", "own", "kept"),
    [
        ("2-5,10\n", [0, 1, 2, 3, 10], {2, 3, 10}),
        ("2-5,10\n", [0, 1, 2], None),  # too few for its threads
        ("4-7\n", [0, 1], None),  # a launcher has chosen others
        ("\n", [0, 1], None),  # a virtual machine tells nothing
        (None, [0, 1], None),
    ],
)
def test_a_rank_keeps_those_of_its_cores_that_are_near(
    near: str | None, own: list[int], kept: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    if near is not None:
        (tmp_path / "0000:c1:00.0").mkdir()
        (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text(near)
    monkeypatch.setattr(cores, "DEVICES", tmp_path)
    monkeypatch.setattr(cores, "own_cores", lambda: own)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: bound.append(set(chosen)))
    keep_near(GPU, threads=2)
    assert bound == ([] if kept is None else [kept])
