"""What the judge makes of beats, one each second."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pretraining.processes.judge import Beat, Judge, LapTimer

WHY = "its own output or its machine's log says why\n"


def hear(judge: Judge, seconds: int, *ranks: Callable[[int], Beat]) -> list[str | None]:
    """Its verdicts on ranks that say this in each second."""
    verdicts = []
    for second in range(seconds):
        judge.hear({rank: say(second) for rank, say in enumerate(ranks)}, 1.0)
        verdicts.append(judge.verdict())
    return verdicts


def works(second: int) -> Beat:
    return Beat(second + 1, marks=second)


def hangs(second: int) -> Beat:
    return Beat(second + 1, marks=1)


def dies(second: int) -> Beat:
    return works(min(second, 5))


def loses(second: int) -> Beat:
    return Beat(second + 1, marks=min(second, 5), lost="Connection closed" if second > 5 else "")


def default_judge() -> Judge:
    return Judge(every=1.0, silence=60.0, hang=1800.0)


def test_ranks_that_never_beat_are_missed() -> None:
    verdicts = hear(default_judge(), 70, works, lambda _: Beat(), lambda _: Beat())
    [first] = {verdict for verdict in verdicts if verdict}
    assert first.startswith("ranks 1, 2 have ended")
    assert verdicts.index(first) in range(58, 62)


def test_a_late_beat_alarms_nobody() -> None:
    def starves(second: int) -> Beat:
        return works(second // 30 * 30)

    assert not any(hear(default_judge(), 3000, works, starves))


def test_those_that_are_lost_are_named_and_not_those_that_say_so() -> None:
    def is_lost_and_late(second: int) -> Beat:
        return loses(min(second, 7))

    verdicts = hear(default_judge(), 20, loses, dies, is_lost_and_late)
    assert verdicts[:8] == [None] * 8
    assert {verdict for verdict in verdicts[10:] if verdict} == {
        f"rank 1 has ended, or cannot be reached any more\n{WHY}"[:-1]
    }


def test_a_lost_connection_without_a_dead_rank_keeps_its_reason() -> None:
    verdict = hear(default_judge(), 20, loses, works)[-1]
    assert verdict == f"another rank has ended, or cannot be reached any more: Connection closed\n{WHY}"[:-1]


def test_an_operation_that_timed_out_is_no_death() -> None:
    def times_out(second: int) -> Beat:
        return Beat(second + 1, marks=5, lost="gloo: Timed out waiting 1800000ms for recv" if second > 5 else "")

    verdict = hear(default_judge(), 20, times_out, hangs)[-1]
    assert verdict is not None
    assert verdict.startswith("rank 1 did not come to where the others wait\n")


def test_the_ranks_with_the_fewest_marks_hang() -> None:
    verdicts = hear(default_judge(), 1900, lambda second: Beat(second + 1, marks=2), hangs, hangs)
    [verdict] = {verdict for verdict in verdicts if verdict}
    assert verdict.startswith("ranks 1, 2 have not moved for 30 min: they hang, and the others wait for them\n")
    assert verdicts.index(verdict) in range(1799, 1803)


def test_ranks_that_stand_together_hang_all() -> None:
    verdict = hear(default_judge(), 1900, hangs, hangs)[-1]
    assert verdict is not None
    assert verdict.startswith("no rank has moved for 30 min\n")
    assert verdict.endswith("\nthe same command goes on from the last checkpoint")


def test_ranks_have_two_hours_for_their_first_step() -> None:
    """NCCL may wait for ever for one that does not connect."""
    verdicts = hear(default_judge(), 7210, *[lambda second: Beat(second + 1)] * 2)
    [verdict] = {verdict for verdict in verdicts if verdict}
    assert verdict.startswith("no rank has moved for 120 min\n")
    assert verdicts.index(verdict) in range(7198, 7202)


def test_nobody_hangs_in_a_pause() -> None:
    assert not any(hear(default_judge(), 4000, hangs, lambda second: Beat(second + 1, 1, paused=second % 1700 > 1600)))


def test_time_in_which_a_rank_was_stopped_itself_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timer = LapTimer(3.0)
    seconds = []
    for passed in (1.0, 2.5, 3600.0, 1.0):
        now[0] += passed
        seconds.append(timer.lap())
    assert seconds == [1.0, 2.5, 3.0, 1.0]
