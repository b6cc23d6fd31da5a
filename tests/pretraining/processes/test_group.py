"""Ranks that meet, agree and part, and what each of them computes with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import LAUNCHERS, ROOT, Done, free_port, spawn

from data_prep.common.errors import UserError
from pretraining.processes import group as ranks_module
from pretraining.processes.group import choose_device, connect, default_threads, disconnect, shared_errors
from pretraining.processes.launchers import World, find_world
from pretraining.processes.watchdog import Watch

# Devices and threads


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    place = World(1, 2, 1, 2)
    assert choose_device("auto", place) == choose_device("cuda", place) == torch.device("cuda", 1)
    assert choose_device("cpu", place) == torch.device("cpu")
    with pytest.raises(UserError, match=r"4 ranks on .*, but 2 GPUs"):
        choose_device("auto", World(1, 4, 1, 4))


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    with pytest.raises(UserError, match=r"2 ranks on .*, but 1 GPUs"):
        choose_device("auto", World(1, 2, 1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # srun --gpus-per-task=1
    assert choose_device("auto", World(1, 2, 1, 2)) == torch.device("cuda", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # deepspeed --num_gpus 2 where there is one
    with pytest.raises(UserError, match="but 1 GPUs"):
        choose_device("auto", World(1, 2, 1, 2))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    assert choose_device("auto", World()) == torch.device("cpu")
    with pytest.raises(UserError, match=r"a GPU was asked for[\s\S]*`cpu`"):
        choose_device("cuda", World())


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "num_cores", lambda: 8)
    assert default_threads(World(), {}) == 8
    assert default_threads(World(0, 2, 0, 2), {}) == 4
    assert default_threads(World(0, 16, 0, 16), {}) == 1
    assert default_threads(World(), {"OMP_NUM_THREADS": "3"}) == 3
    assert default_threads(World(0, 2, 0, 2), {"OMP_NUM_THREADS": "1"}) == 1
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}  # which nobody chose
    assert default_threads(World(0, 2, 0, 2), torchrun) == 4


# Processes. Each script says where ranks differ; `main` is what an entry does around its work.

MAIN = """
import os, sys, time, torch, torch.distributed as dist
from data_prep.common.errors import UserError
from pretraining.processes.launchers import find_world
from pretraining.processes.group import *
from pretraining.processes.group import SharedError
ranks = find_world(os.environ)
rank = ranks.rank

def main(work, **options):
    try:
        connect(ranks, choose_device("cpu", ranks), timeout=60, **options)
        work()
    except UserError as error:
        if speaks(ranks, error):
            print(f"error: {error}", file=sys.stderr)
        exit_now(2)
    disconnect()
"""


def expect_failure(done: list[Done], message: str, seconds: float | None = None) -> None:
    """All end with 2, and the message is on rank 0 alone, once and without a traceback."""
    assert [each.code for each in done] == [2] * len(done), done
    assert done[0].errors.count(message) == 1, done
    assert "Traceback" not in done[0].errors
    assert [each.output + each.errors for each in done[1:]] == [""] * (len(done) - 1)


def three_agree() -> object:
    place = find_world(os.environ)
    connect(place, torch.device("cpu"), timeout=60)
    ranks_module.agree({"seed": 1, "lengths": [128, 512]}, "recipe")
    with shared_errors():
        total = torch.ones(1)
        dist.all_reduce(total)
    bound = [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]][place.rank]  # as a launcher might: one alone, two share theirs
    setattr(ranks_module, "_affinity", lambda: bound)  # noqa: B010
    setattr(ranks_module, "num_cores", lambda: 4)  # noqa: B010
    threads = default_threads(place, {})
    before = os.environ["DS_ACCELERATOR"], os.environ["GLOO_SOCKET_IFNAME"]
    disconnect()
    return float(total), threads, before, "GLOO_SOCKET_IFNAME" in os.environ, dist.is_initialized()


def test_ranks_that_agree_go_on() -> None:
    done = spawn(3, three_agree)
    assert [each.result[1] for each in done] == [4, 2, 2]  # threads
    assert [each.result[0::2] for each in done] == [(3.0, ("cpu", "lo"), False)] * 3
    assert not any(each.result[3] for each in done)


def test_ranks_that_disagree_all_end_with_one_message() -> None:
    done = spawn(3, MAIN + "main(lambda: agree({'seed': rank == 1}, 'recipe'))")
    expect_failure(done, "error: recipe: rank 1 differs from rank 0\n")


def test_an_error_at_the_start_on_one_rank_is_every_rank_s() -> None:
    script = """
def work():
    with shared_errors():
        if rank == 1:
            raise UserError("no shards in data/")
        agree(1, "data")  # rank 1 never comes here
    print("went on")
main(work)
"""
    done = spawn(2, MAIN + script)
    expect_failure(done, "error: rank 1: no shards in data/\n")
    assert "went on" not in done[0].output


def test_the_same_error_on_all_ranks_is_told_once_without_their_numbers() -> None:
    script = """
def work():
    with shared_errors():
        raise UserError("no shards in data/")
main(work)
"""
    done = spawn(2, MAIN + script)
    expect_failure(done, "error: no shards in data/\n")


def test_a_mistake_of_ours_at_the_start_leaves_no_rank_behind() -> None:
    script = """
def work():
    with shared_errors():
        assert rank == 0, "a mistake"
main(work)
"""
    first, second = spawn(2, MAIN + script)
    assert (first.code, second.code) == (2, 1)
    assert "AssertionError: a mistake" in first.errors
    assert "AssertionError: a mistake" in second.errors


def test_a_rank_that_is_gone_at_the_start_is_told() -> None:
    script = """
def work():
    if rank == 1:
        os._exit(9)
    agree(1, "recipe")
main(work)
"""
    done = spawn(2, MAIN + script, timeout=60)
    assert [each.code for each in done] == [2, 9]
    assert "error: another rank has ended, or cannot be reached any more" in done[0].errors
    assert "Traceback" not in done[0].errors


IN_USE = "is in use by another program or run\nchoose a free one: MASTER_PORT=<port>"


def test_a_port_that_a_silent_program_holds() -> None:
    script = "import pretraining.processes.group as group\ngroup.ANSWER_SECONDS = 3.0\nmain(lambda: None)"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = spawn(2, MAIN + script, port=other.getsockname()[1], timeout=60)
    expect_failure(done, IN_USE)


def test_a_port_that_another_run_holds() -> None:
    """Its store would answer as ours: no rank may join that run."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set("cloze/ranks", "2")
    store.add("cloze/joined/1", 1)
    done = spawn(2, MAIN + "main(lambda: None)", port=port, timeout=60)
    expect_failure(done, IN_USE)


def test_ranks_that_never_come_are_named() -> None:
    more = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    done = spawn(2, MAIN + "main(lambda: None, patience=4.0)", environment=more, timeout=60)
    expect_failure(done, "error: ranks 2, 3 of 4 did not come in 4 s\n")


def test_rank_1_speaks_where_rank_0_is_not_there() -> None:
    more = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    [done] = spawn(1, MAIN + "main(lambda: None, patience=1.0)", environment=more, timeout=60)
    assert done.code == 2
    assert "error: rank 1 did not reach rank 0 at 127.0.0.1:" in done.errors


def test_one_process_has_a_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed wants one; and nothing of it stays behind."""
    before = dict(os.environ)
    connect(World(), torch.device("cpu"))
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        ranks_module.agree(1, "recipe")
        with Watch(World()) as watch, watch.pause(), shared_errors():
            watch.mark()
            assert (float(total), os.environ["LOCAL_RANK"]) == (1.0, "0")
    finally:
        disconnect()
    assert dict(os.environ) == before
    assert not dist.is_initialized()


# One write a line: launchers let ranks write unbuffered to one pipe.
WHO = MAIN + "main(lambda: sys.stdout.write(f'{rank} of {ranks.size} by {ranks.launcher}\\n'))"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nproc-per-node 2", "torchrun"),
        ("mpirun --allow-run-as-root --oversubscribe -n 2 {python}", "mpirun"),
    ],
)
def test_real_launchers(command: str, launcher: str, tmp_path: Path) -> None:
    bin_folder = Path(sys.executable).parent
    words = command.format(python=sys.executable).split()
    program = shutil.which(words[0], path=f"{bin_folder}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"no {words[0]} here")
    (tmp_path / "who.py").write_text(WHO)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    start = time.monotonic()
    done = subprocess.run(
        [program, *words[1:], str(tmp_path / "who.py")],
        env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 2 by {launcher}" for rank in range(2)]
    assert time.monotonic() - start < 60
