"""How a process ends: what it prints, what it leaves in the run's folder, and with which code."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import expect_end, spawn, take_part

from data_prep.common.codes import MEANINGS, explain_code
from data_prep.common.errors import LostError, SharedError, UnreachedError, UserError
from data_prep.common.files import read_json, write_json
from data_prep.common.launchers import World
from data_prep.common.locks import LOCK, locked
from pretraining.processes import ending as ending_module
from pretraining.processes.ending import ENDED, GONE, INTERRUPTION, STACKS, Code, Ending
from pretraining.processes.stopping import Decision, StoppedError
from pretraining.processes.watchdog import Watch
from pretraining.train import record_early

pytestmark = pytest.mark.usefixtures("leaves_group")


def end_with(error: Exception | int | None, run: Path | None = None, rank: int = 0, machines: int = 1) -> int:
    """The code of a process in whose work an error happens, or a signal arrives; three ranks are on each machine."""
    with Ending() as ending:
        ending.world = World(rank, 3 * machines, rank % 3, 3)
        if run is not None:
            ending.record_in(run)
        if isinstance(error, Exception):
            raise error
        if error is not None:
            signal.raise_signal(error)
    return ending.code


LOST = "another rank has ended, or cannot be reached any more: gone\nits own output or its machine's log says why"
SAVED, CTRL_C = StoppedError("saved", Decision.LIMIT), StoppedError("saved", Decision.INTERRUPT)


def fail_to_write(number: int) -> UserError:
    told = UserError("log: cannot be written")
    told.__cause__ = OSError(number, os.strerror(number))
    return told


@pytest.mark.parametrize(
    ("error", "code", "reason", "message"),
    [
        (None, Code.DONE, "done", ""),
        (UserError("no room"), Code.CURE, "no room", "error: no room\n"),
        (SharedError("no shards"), Code.CURE, "no shards", "error: no shards\n"),
        (SAVED, Code.STOPPED, "saved", "saved\n"),
        (CTRL_C, Code.INTERRUPTED, "saved", "saved\n"),
        (signal.SIGTERM, Code.STOPPED, INTERRUPTION, f"\n{INTERRUPTION}\n"),
        (signal.SIGINT, Code.INTERRUPTED, INTERRUPTION, f"\n{INTERRUPTION}\n"),
        (fail_to_write(errno.ENOSPC), Code.CURE, "log: cannot be written", "error: log: cannot be written\n"),
        (fail_to_write(errno.ESTALE), Code.RANK_LOST, f"log: cannot be written\n{GONE}", None),
        (LostError("gone\nframes"), Code.RANK_LOST, LOST, None),
    ],
)
def test_every_end_has_its_code_message_and_record(
    error: Exception | int | None,
    code: Code,
    reason: str,
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is lost leaves its stack, and says where."""
    write_json(tmp_path / ENDED, {"code": 76})  # why the run ended the last time
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert end_with(error, tmp_path) == code
    told = f"error: {reason}\nthe stacks of the ranks that still run are in {tmp_path / STACKS}\n"
    assert capsys.readouterr().err == (told if message is None else message)
    ended = read_json(tmp_path / ENDED)
    assert datetime.now(timezone.utc) - datetime.fromisoformat(ended.pop("time")) < timedelta(minutes=1)
    assert ended == {"code": code, "reason": reason, "rank": 0, "start": "7.1"}
    stacks = [] if message is not None else [STACKS, f"{STACKS}/rank-00000.txt"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [ENDED, *stacks]


def test_a_mistake_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(AssertionError("of ours"), tmp_path) == Code.MISTAKE
    errors = capsys.readouterr().err
    assert errors.startswith("Traceback")
    assert errors.endswith("\nAssertionError: of ours\n")
    assert read_json(tmp_path / ENDED)["reason"] == "AssertionError: of ours"


@pytest.mark.parametrize(
    ("error", "ranks", "speakers"),
    [
        (UserError("no room"), range(3), [0]),
        (UnreachedError("far"), range(3), [0, 1]),
        (LostError("gone"), range(3), [0, 1]),
        (LostError("gone"), range(3, 6), [3]),  # of the second machine, where the first is gone
    ],
)
def test_who_speaks(
    error: Exception, ranks: range, speakers: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ranks:
        end_with(error, tmp_path / str(rank), rank, machines=1 + (3 in ranks))
        assert bool(capsys.readouterr().err) == (tmp_path / str(rank) / ENDED).exists() == (rank in speakers)


@pytest.mark.parametrize("goes_on", [False, True], ids=["the same start", "another start"])
def test_a_rank_that_comes_late_writes_over_nothing(goes_on: bool, tmp_path: Path) -> None:
    """In containers, both holders of the lock may have the same process number."""
    (tmp_path / LOCK).write_text("process 1 on node1\nfirst\n")
    with Ending() as late:
        late.world = World(1, 2, 1, 2)
        late.record_in(tmp_path)
        end_with(UserError("rank 1 is silent"), tmp_path)  # as rank 0
        if goes_on:
            (tmp_path / ENDED).unlink()
            (tmp_path / LOCK).write_text("process 1 on node1\nsecond\n")
        raise LostError("rank 0 is gone")
    assert late.code == Code.RANK_LOST
    assert {path.name for path in tmp_path.iterdir()} == {LOCK} | (set() if goes_on else {ENDED, STACKS})
    assert goes_on or read_json(tmp_path / ENDED)["reason"] == "rank 1 is silent"


def test_a_start_that_another_one_overtakes_writes_no_end(tmp_path: Path) -> None:
    """Between the look at its command and the lock that it keeps, another start may take the folder."""
    (tmp_path / LOCK).touch()
    with Ending() as late:
        record_early(tmp_path, late)
        with locked(tmp_path / LOCK, "", ""):
            raise UserError("another start is training in this folder")
    assert late.code == Code.CURE
    assert {path.name for path in tmp_path.iterdir()} == {LOCK}


def test_without_a_folder_an_end_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(LostError("gone")) == Code.RANK_LOST
    assert capsys.readouterr().err == f"error: {LOST}\n"


@pytest.mark.parametrize("write", [lambda *_: 1 / 0, lambda *_: threading.Event().wait()], ids=["fails", "never ends"])
def test_a_disk_hides_no_error(
    write: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "write_json", write)
    monkeypatch.setattr(ending_module, "WRITE_SECONDS", 0.1)
    assert end_with(UserError("no room"), tmp_path) == Code.CURE
    assert capsys.readouterr().err == "error: no room\n"


def fail_where_no_group_can_be_left(run: Path, world: World) -> None:
    dist.destroy_process_group = threading.Event().wait  # type: ignore[assignment]  # as NCCL's may
    with Watch(world, every=0.2, run=run):
        dist.all_reduce(torch.ones(1))
        if world.rank == 1:
            raise UserError("no room")
        dist.all_reduce(torch.ones(1))


def test_an_error_is_told_although_the_group_cannot_be_left(tmp_path: Path) -> None:
    done = spawn(2, take_part, partial(fail_where_no_group_can_be_left, tmp_path))
    expect_end(done, Code.CURE, "error: rank 1: no room\n")
    ended = read_json(tmp_path / ENDED)
    assert (ended["code"], ended["reason"], ended["rank"]) == (2, "no room", 1)
    assert not (tmp_path / STACKS).exists(), "of an error that says all"


def test_a_code_is_told_with_its_meaning() -> None:
    assert [*map(explain_code, (130, 137, 255, 3))] == ["130 (Ctrl-C)", "137 (killed by SIGKILL)", "255", "3"]
    assert MEANINGS.keys() == set(Code)
    assert [*map(int, Code)] == [0, 1, 2, 75, 76, 130], "job scripts and CHANGELOG.md have these numbers"
