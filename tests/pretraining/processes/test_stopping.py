"""How a time limit is written, and what signals ask for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes import stopping
from pretraining.processes.stopping import STOPPING, Control, Decision, parse_time_limit

pytestmark = pytest.mark.usefixtures("leaves_group", "alone")

TraceFunction = Callable[[FrameType, str, Any], Any]

LIMITS = {
    "90m": 5400,
    "2h": 7200,
    "1.5h": 5400,
    "45s": 45,
    "1d": 86400,
}


def test_how_a_time_limit_is_written() -> None:
    assert {text: parse_time_limit(text, {}) for text in LIMITS} == LIMITS
    for text in ("", "90", "m", "-2h", "2 h", "2w", "1:2:3", "1-12", "12:00:00", "tomorrow", "1e3s", "nan", "12:00h"):
        with pytest.raises(UserError, match=f"--time-limit {text}: not understood"):
            parse_time_limit(text, {})


def test_the_end_of_the_slurm_job() -> None:
    for text in ("", "soon"):
        assert parse_time_limit("auto", {"SLURM_JOB_END_TIME": text}) is None
    assert parse_time_limit("auto", {}) is None
    limit = parse_time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)})
    assert limit is not None
    assert limit - (time.monotonic() - stopping.STARTED) == pytest.approx(1000, abs=60)


def test_the_clock_stops_a_run_on_whichever_rank_it_passes() -> None:
    limit = parse_time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()))})
    for each, decision in ((limit, Decision.LIMIT), (1e9, Decision.GO_ON), (None, Decision.GO_ON)):
        with Control(World(), each) as control:
            assert control.decide(wrong=False, saving=0.1) == decision


def raise_signals(launcher: str, *numbers: signal.Signals, apart: float) -> tuple[Decision, list[str]]:
    """What a run alone decides after signals that come so many seconds apart, and what it has said."""
    said: list[str] = []
    with Control(World(launcher=launcher)) as control, control.interruptible(said.append):
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(apart)
        return control.decide(wrong=False, saving=0.0), said


PASSED_ON = [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
"""what one key press may come as"""


@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_key_press_counts_once_whenever_it_comes_again(
    number: signal.Signals, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs the handler of a second signal between any two lines of that of the first."""
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 60.0)
    said: list[str] = []
    left = [line]

    def come_again(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if frame.f_code.co_name != "_hear" or not left:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                left.clear()
                signal.raise_signal(number)
        return come_again

    with Control(World(launcher="torchrun")) as control, control.interruptible(said.append):
        before = sys.gettrace()
        sys.settrace(come_again)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            sys.settrace(before)
        assert (control.decide(wrong=False, saving=0.0), said) == (Decision.INTERRUPT, [STOPPING])
    assert not left, "the second signal came"


@pytest.mark.parametrize("launcher", ["plain", "torchrun", "deepspeed", "mpirun"])
def test_one_key_press_counts_once_however_often_it_arrives(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 60.0)
    assert raise_signals(launcher, *PASSED_ON, apart=0.01) == (Decision.INTERRUPT, [STOPPING])


def test_what_signals_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 0.05)
    assert raise_signals("plain", apart=0.0) == (Decision.GO_ON, [])
    for number in (signal.SIGTERM, signal.SIGUSR1):
        assert raise_signals("plain", number, number, apart=0.1) == (Decision.SIGNAL, [])
    assert raise_signals("plain", signal.SIGTERM, signal.SIGINT, apart=0.1) == (Decision.INTERRUPT, [STOPPING])
    assert raise_signals("deepspeed", signal.SIGINT, signal.SIGTERM, apart=0.1) == (Decision.INTERRUPT, [STOPPING])


@pytest.mark.parametrize(("launcher", "second"), [("plain", signal.SIGINT), ("torchrun", signal.SIGTERM)])
def test_a_second_press_ends_at_once(launcher: str, second: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 0.05)
    with pytest.raises(KeyboardInterrupt):
        raise_signals(launcher, signal.SIGINT, second, apart=0.1)


def test_outside_of_training_ctrl_c_is_as_it_was() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Control(World()) as control:
        with control.interruptible(print):
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("seconds", "votes"), [(0.001, 1), (0.05, 8), (2.0, 40)])
def test_ranks_ask_one_another_by_the_clock(seconds: float, votes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand ranks a vote takes longer than a small micro-batch."""
    counted: list[object] = []
    now = [0.0]
    with Control(World()) as control:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", lambda vote, *_, **__: counted.append(vote))
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        control.decide(wrong=False, saving=0.0)
        for _ in range(40):
            now[0] += seconds
            assert not control.stop_requested_anywhere()
        assert len(counted) - 1 <= votes
        os.kill(os.getpid(), signal.SIGUSR1)
        heard_at = now[0]
        while not control.stop_requested_anywhere():
            now[0] += seconds
        assert now[0] - heard_at <= max(1.0, seconds)
