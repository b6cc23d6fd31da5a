"""Ranks that fail, die or hang end the run on all, named; and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from support.processes import Done, _done, _start, _wait, free_port, spawn
from test_group import MAIN, expect_failure

SCRIPT = MAIN + "import signal\nfrom pretraining.processes.watchdog import *\n"
WHY = "its own output or its machine's log says why\n"


# Ranks that fail, and that end as they should


@pytest.mark.parametrize(("failing", "message"), [(0, "error: NaN at step 3\n"), (1, "error: rank 1: NaN at step 3\n")])
def test_a_rank_in_an_all_reduce_does_not_wait_for_one_that_failed(failing: int, message: str) -> None:
    script = f"""
def work():
    with Watch(ranks, every=0.2):
        dist.all_reduce(torch.ones(1))
        if rank == {failing}:
            time.sleep(0.5)
            raise UserError("NaN at step 3")
        dist.all_reduce(torch.ones(1))
        print("went on")
main(work)
"""
    done = spawn(3, SCRIPT + script, timeout=30)
    expect_failure(done, message)
    assert "went on" not in done[0].output


def test_the_same_error_on_all_ranks_during_the_work_is_told_once() -> None:
    script = """
def work():
    with Watch(ranks, every=0.2):
        dist.all_reduce(torch.ones(1))
        raise UserError("NaN at step 3")
main(work)
"""
    done = spawn(2, SCRIPT + script, timeout=30)
    expect_failure(done, "NaN at step 3\n")


def test_the_others_end_when_rank_0_is_gone() -> None:
    script = """
def work():
    with Watch(ranks, every=0.2, silence=8.0):
        if rank == 0:
            time.sleep(1)  # the other is at work
            os._exit(9)
        time.sleep(25)
main(work)
"""
    done = spawn(2, SCRIPT + script, timeout=30)
    assert [each.code for each in done] == [9, 2]
    assert "error: rank 0 has ended" in done[1].errors


def test_rank_0_is_gone_for_those_in_an_all_reduce() -> None:
    script = """
def work():
    with Watch(ranks, every=0.2, silence=200.0):
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
main(work)
"""
    done = spawn(3, SCRIPT + script, timeout=30)
    assert [each.code for each in done] == [-signal.SIGKILL, 2, 2]
    assert [each.errors for each in done] == ["", "error: rank 0 has ended, or its machine is gone\n", ""]


def test_a_regular_end_is_regular() -> None:
    script = """
def work():
    with Watch(ranks, every=0.01):
        time.sleep(0.5 * rank)
    print("done")
main(work)
"""
    done = spawn(2, SCRIPT + script, timeout=30)
    assert [(each.code, each.output, each.errors) for each in done] == [(0, "done\n", "")] * 2


# Ranks that die


def test_a_killed_rank_is_named_by_those_in_an_all_reduce() -> None:
    script = """
def work():
    with Watch(ranks, every=0.5):
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
main(work)
"""
    expect_gone(1, spawn(3, SCRIPT + script, timeout=30))


def test_a_killed_rank_is_missed_by_those_that_do_not_wait_for_it() -> None:
    script = """
def work():
    with Watch(ranks, every=0.3, silence=3.0) as watch:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with watch.pause():
            time.sleep(60)
main(work)
"""
    expect_gone(1, spawn(3, SCRIPT + script, timeout=30))


def expect_gone(gone: int, done: list[Done]) -> None:
    assert [each.code for each in done] == [-signal.SIGKILL if rank == gone else 2 for rank in range(len(done))], done
    assert [each.output for each in done] == [""] * len(done)
    message = f"error: rank {gone} has ended, or cannot be reached any more\n{WHY}"
    assert [each.errors for each in done] == [message] + [""] * (len(done) - 1)


@contextmanager
def begun(
    ranks: int, script: str, folder: Path
) -> Iterator[tuple[list[subprocess.Popen[bytes]], Callable[[int], Done]]]:
    """The processes of ranks, and what became of one. All have ended afterwards."""
    port = free_port()
    processes = [_start(rank, ranks, script, folder, {}, port) for rank in range(ranks)]
    try:
        yield processes, lambda rank: _done(processes[rank], rank, folder)
    finally:
        _wait(processes, time.monotonic())


@pytest.mark.parametrize(
    ("stopped", "speaker", "message"),
    [
        (1, 0, f"error: rank 1 has ended, or cannot be reached any more\n{WHY}"),
        (0, 1, "error: rank 0 has ended, or its machine is gone\n"),
    ],
)
def test_a_stopped_rank_is_missed_and_ends_when_it_goes_on(
    stopped: int, speaker: int, message: str, tmp_path: Path
) -> None:
    script = f"""
def work():
    with Watch(ranks, every=0.3, silence=3.0):
        dist.all_reduce(torch.ones(1))
        if rank == {stopped}:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
        time.sleep(60)
main(work)
"""
    with begun(3, SCRIPT + script, tmp_path) as (processes, done):
        others = [process for rank, process in enumerate(processes) if rank != stopped]
        assert not _wait(others, time.monotonic() + 30)
        assert processes[stopped].poll() is None
        assert (done(speaker).code, done(speaker).errors) == (2, message)
        assert (done(2).code, done(2).errors) == (2, "")
        processes[stopped].send_signal(signal.SIGCONT)
        assert not _wait([processes[stopped]], time.monotonic() + 20)
        assert done(stopped).code == 2


def test_the_others_end_when_rank_0_is_killed_but_not_its_store() -> None:
    """torchrun holds the store then."""
    script = """
def work():
    with Watch(ranks, every=0.3, silence=3.0):
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
main(work)
"""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    held = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = spawn(3, SCRIPT + script, environment=held, port=store.port, timeout=30)
    assert [each.code for each in done] == [-signal.SIGKILL, 2, 2]
    assert [each.errors for each in done] == ["", "error: rank 0 has ended, or its machine is gone\n", ""]


# Ranks that hang


def test_a_rank_for_which_the_others_wait_is_named() -> None:
    script = """
def work():
    with Watch(ranks, every=0.2, hang=2.0) as watch:
        for step in range(3):
            if rank == 2 and step == 1:
                time.sleep(60)
            watch.mark()
            dist.all_reduce(torch.ones(1))
main(work)
"""
    done = spawn(3, SCRIPT + script, timeout=30)
    expect_failure(done, "error: rank 2 has not moved for 2 s: it hangs, and the others wait for it\n")


def test_long_work_within_a_pause_hangs_not() -> None:
    """Not even for the others, which wait at the end."""
    script = """
def work():
    with Watch(ranks, every=0.1, hang=1.0) as watch:
        watch.mark()
        if rank == 1:
            with watch.pause(), watch.pause():
                pass
            with watch.pause():
                time.sleep(3)
    print("done")
main(work)
"""
    done = spawn(2, SCRIPT + script, timeout=30)
    assert [(each.code, each.output, each.errors) for each in done] == [(0, "done\n", "")] * 2
