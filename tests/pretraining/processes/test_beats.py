"""What the monitor makes of beats, one each second."""

import time
from collections.abc import Callable

import pytest

from pretraining.processes.beats import Beat, LapTimer, RankMonitor

WHY = "its own output or its machine's log says why"


def works(second: int) -> Beat:
    return Beat(second + 1, marks=second)


def hangs(second: int) -> Beat:
    return Beat(second + 1, marks=1)


def dies(second: int) -> Beat:
    return works(min(second, 5))


def loses(second: int, why: str = "Connection closed") -> Beat:
    return Beat(second + 1, marks=min(second, 5), lost=why if second > 5 else "")


TIMED_OUT = "gloo: Timed out waiting 1800000ms for recv"
GONE = "has ended, or cannot be reached any more"
FOR_TWO = "the others wait for ranks 1, 2, which did not move for 30"
SOMEONE = f"another rank {GONE}: Connection closed\n{WHY}"


@pytest.mark.parametrize(
    ("ranks", "seconds", "first", "told"),
    [
        ([works, *[lambda _: Beat()] * 2], 70, 60, "ranks 1, 2 have ended"),
        ([works, dies, lambda second: works(min(second, 7))], 80, 65, "ranks 1, 2 have ended"),  # of one machine
        ([works, lambda second: works(second // 30 * 30)], 300, None, ""),  # a late beat alarms nobody
        ([loses, dies, lambda second: loses(min(second, 7))], 20, 10, f"rank 1 {GONE}\n{WHY}"),  # not who says so
        ([loses, works], 20, 10, SOMEONE),
        ([lambda second: loses(second, TIMED_OUT), hangs], 20, 10, "rank 1 did not come to where the others wait\n"),
        ([lambda second: Beat(second + 1, 2), hangs, hangs], 1900, 1801, FOR_TWO),
        ([hangs, hangs], 1900, 1801, "no rank has moved for 30 min\n"),
        (
            [lambda second: Beat(second + 1)] * 2,
            7210,
            7200,
            "no rank has moved for 120 min\n",
        ),  # NCCL may wait for ever
        ([hangs, lambda second: Beat(second + 1, 1, paused=second % 1700 > 1600)], 4000, None, ""),
    ],
)
def test_what_is_said_and_when(ranks: list[Callable[[int], Beat]], seconds: int, first: int | None, told: str) -> None:
    monitor, verdicts = RankMonitor(every=1.0, silence=60.0, hang=1800.0), []
    for second in range(seconds):
        monitor.add({rank: say(second) for rank, say in enumerate(ranks)}, 1.0)
        verdicts.append(monitor.find_failure())
    [*found] = {verdict for verdict in verdicts if verdict}
    assert [verdict.startswith(told) for verdict in found] == [True] * (first is not None)
    if first is not None:
        assert abs(verdicts.index(found[0]) - first) <= 2
        assert "no rank" not in told or found[0].endswith("the same command goes on from the last checkpoint")


def test_time_in_which_a_rank_was_stopped_itself_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timer = LapTimer(3.0)
    seconds = []
    for passed in (1.0, 2.5, 3600.0, 1.0):
        now[0] += passed
        seconds.append(timer.lap())
    assert seconds == [1.0, 2.5, 3.0, 1.0]
