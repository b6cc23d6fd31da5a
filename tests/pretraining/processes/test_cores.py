"""Ranks stay on the cores next to their GPU, and say where other programs take the cores of a run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import FEW, Place, train

from pretraining.processes import cores
from pretraining.processes.cores import STRETCH, CoreWatch, keep_near, read_cores

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
    monkeypatch.setattr(cores, "list_cores", lambda: own)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: bound.append(set(chosen)))
    keep_near(GPU, threads=2)
    assert bound == ([] if kept is None else [kept])


class Threads:
    """What Linux would say of threads, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0

    def wait(self, thread: int, seconds: float) -> None:
        """A thread that has waited for so many seconds in all."""
        (self.folder / str(thread)).mkdir(exist_ok=True)
        (self.folder / str(thread) / "schedstat").write_text(f"5000000000 {int(seconds * 1e9)} 7\n")

    def watch(self) -> CoreWatch:
        return CoreWatch(self.folder, lambda: self.now)


def test_waiting_is_said_once_and_only_where_it_is_much_of_a_stretch(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    threads.wait(1, seconds=1000)  # before it is watched
    watch = threads.watch()
    threads.now += STRETCH / 2
    threads.wait(1, seconds=1015)
    assert watch.word() is None, "a stretch lasts longer"
    threads.wait(2, seconds=3)  # one that has begun since
    threads.now += STRETCH / 2
    assert "waits for cores, its threads together 0.6 s in each second" in str(watch.word())
    threads.now += STRETCH
    threads.wait(1, seconds=2000)
    assert watch.word() is None, "it was said"


def test_each_stretch_is_judged_by_itself(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    watch = threads.watch()
    for seconds in (3, 6, 9, 12):  # a tenth of the time, as where a thread cuts text beside the others
        threads.now += STRETCH
        threads.wait(1, seconds)
        assert watch.word() is None
    (tmp_path / "1" / "schedstat").unlink()
    threads.now += STRETCH
    assert watch.word() is None, "a thread has ended"
    assert CoreWatch(tmp_path / "none", lambda: threads.now).word() is None, "a system that counts nothing"


@pytest.mark.parametrize(("spins", "cure"), [("1000000", True), ("2000", False), (None, False)])
def test_the_cure_is_named(spins: str | None, cure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if spins is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", spins)
    threads = Threads(tmp_path)
    watch = threads.watch()
    threads.now += STRETCH
    threads.wait(1, seconds=STRETCH)
    assert ("GOMP_SPINCOUNT=2000" in str(watch.word())) == cure


def notice_all() -> None:
    """Every stretch is judged, and any waiting is much."""
    cores.STRETCH, cores.MUCH = 0.0, -1.0


def test_a_training_asks_and_says_it_once(place: Place) -> None:
    done = train(place.command("run", *FEW), ranks=1, fault=notice_all)
    assert [rank.code for rank in done] == [0]
    assert done[0].errors.count("warning: this process waits for cores") == 1
