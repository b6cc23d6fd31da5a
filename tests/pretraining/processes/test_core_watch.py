"""A word where other programs take the cores of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.training import Place, train

from pretraining.processes import cores
from pretraining.processes.cores import STRETCH, TASKS, CoreWatch


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
def test_the_cure_is_named_where_it_is_one(
    spins: str | None, cure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = train(place.command("run"), ranks=1, fault=notice_all)
    assert [rank.code for rank in done] == [0]
    assert done[0].errors.count("warning: this process waits for cores") == 1


@pytest.mark.skipif(not (TASKS / str(os.getpid()) / "schedstat").exists(), reason="Linux counts no waiting here")
def test_a_program_on_the_same_core_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "STRETCH", 0.5)
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the core
    try:
        time.sleep(0.2)
        watch, end = CoreWatch(), time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        assert watch.word() is not None
    finally:
        busy.kill()
        busy.wait()
        os.sched_setaffinity(0, own)
