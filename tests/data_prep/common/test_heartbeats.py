"""Ranks hear of one another's end by files in the folder that they share, and of nothing else."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.common.heartbeats import LOST, PERIOD, Heartbeats, Verdict, read_rank

HOST, RANKS = socket.gethostname(), 3


class Job:
    """The ranks of a job in this process, whose clock is turned by hand."""

    def __init__(self, folder: Path, token: str = "token") -> None:
        self.now = 0.0
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.ranks = [Heartbeats(folder / "ranks", token, rank, RANKS, clock) for rank in range(RANKS)]

    def turn(self, seconds: float, *ranks: int) -> dict[int, Verdict]:
        """Lets time go by in which only these ranks live; returns what the others' silence has them do."""
        verdicts: dict[int, Verdict] = {}
        for _ in range(int(seconds / PERIOD)):
            self.now += PERIOD
            for rank in ranks:
                if (verdict := self.ranks[rank].check_others()) is not None:
                    verdicts.setdefault(rank, verdict)
        return verdicts


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    assert not job.turn(4 * PERIOD, 0, 1, 2)
    return job


def test_ranks_that_count_on_are_never_gone(job: Job) -> None:
    """Nor are any after Ctrl-Z and a long pause, when all go on at about the same time."""
    assert not job.turn(3 * LOST, 0, 1, 2)
    job.now += 1000
    assert not job.turn(3 * LOST, 0, 1, 2)


def test_a_silent_rank_is_named_within_a_minute_and_not_before_half_of_one(job: Job) -> None:
    assert not job.turn(30, 0, 1)
    told = f"error: rank 2 on {HOST} is gone (nothing was heard of it for 40 s); the same command continues"
    assert job.turn(28, 0, 1) == {0: Verdict(told, 76)}


def test_where_rank_0_is_silent_one_rank_says_so_and_all_end(job: Job) -> None:
    found = job.turn(58, 1, 2)
    assert f"rank 0 on {HOST} is gone" in found[1].text
    assert found[2] == Verdict("", found[1].code) == Verdict("", 76)


def test_a_rank_that_ends_is_named_at_once(job: Job) -> None:
    assert job.ranks[2].end(1)
    told = f"error: rank 2 on {HOST} has ended with exit code 1, and says why; the same command continues"
    assert job.turn(PERIOD, 0)[0] == Verdict(told, 1)


def test_other_ranks_end_as_rank_0_ends_and_say_nothing(job: Job) -> None:
    assert job.ranks[0].end(130)
    assert job.turn(PERIOD, 1, 2) == {1: Verdict("", 130), 2: Verdict("", 130)}


def test_when_the_folder_goes_as_the_work_is_done_nobody_is_gone(job: Job, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "ranks")
    assert not job.turn(3 * LOST, 0, 1, 2)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_sees_another_folder_or_files_of_an_earlier_job_is_missing(tmp_path: Path) -> None:
    job, folder = Job(tmp_path / "shared"), tmp_path / "shared" / "ranks"
    alone = Heartbeats(tmp_path / "other" / "ranks", "token", 2, RANKS)
    job.turn(PERIOD, 1)
    assert alone.check_others() is None
    assert [read_rank(folder, "token", rank) is None for rank in range(RANKS)] == [False, False, True]
    job.turn(PERIOD, 0, 1, 2)
    Job(tmp_path / "shared", "later")
    assert [read_rank(folder, "later", rank) is None for rank in range(RANKS)] == [False, True, True]


def test_a_file_that_is_half_written_is_no_end(job: Job, tmp_path: Path) -> None:
    for content in ("", "{", '{"token": "token", "co', '["token"]', '{"token": "token", "code": "x"}'):
        (tmp_path / "ranks" / "2").write_text(content)
        assert not job.turn(PERIOD, 0)
