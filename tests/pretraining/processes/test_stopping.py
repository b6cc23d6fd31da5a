"""How a time limit is written, and what signals ask for."""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from support.commands import assert_refusal
from torch import Tensor

from data_prep.common.launchers import World
from pretraining.processes import stopping
from pretraining.processes.stopping import STOPPING, Control, Decision, parse_time_limit

pytestmark = pytest.mark.usefixtures("leaves_group", "alone")

TraceFunction = Callable[[FrameType, str, Any], Any]
SIGINT, SIGTERM, SIGUSR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
LIMITS = {"90m": 5400, "2h": 7200, "1.5h": 5400, "45s": 45, "1d": 86400}


def test_how_a_time_limit_is_written() -> None:
    assert {text: parse_time_limit(text, {}) for text in LIMITS} == LIMITS
    for text in ("", "90", "m", "-2h", "2 h", "2w", "1:2:3", "1-12", "12:00:00", "tomorrow", "1e3s", "nan", "12:00h"):
        assert_refusal(f"--time-limit {text}: not understood", parse_time_limit, text, {})


def test_the_end_of_the_slurm_job() -> None:
    for environment in ({}, {"SLURM_JOB_END_TIME": ""}, {"SLURM_JOB_END_TIME": "soon"}):
        assert parse_time_limit("auto", environment) is None
    limit = parse_time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)})
    assert limit is not None
    assert limit - (time.monotonic() - stopping.STARTED) == pytest.approx(1000, abs=60)


def test_the_clock_stops_a_run_on_whichever_rank_it_passes() -> None:
    limit = parse_time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()))})
    for each, decision in ((limit, Decision.LIMIT), (1e9, Decision.GO_ON), (None, Decision.GO_ON)):
        with Control(World(), each) as control:
            assert control.decide(wrong=False, saving=0.1) == decision


def raise_signals(launcher: str, *numbers: signal.Signals) -> tuple[Decision, list[str]]:
    """What a run alone decides after signals that come one after another, and what it has said."""
    said: list[str] = []
    with Control(World(launcher=launcher)) as control, control.interruptible(said.append):
        for number in numbers:
            signal.raise_signal(number)
        return control.decide(wrong=False, saving=0.0), said


@pytest.mark.parametrize("line", range(4))
@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_one_key_press_counts_once_whenever_it_comes_again(
    number: signal.Signals, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs the handler of a second signal between any two lines of that of the first."""
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 60.0)
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

    before = sys.gettrace()
    sys.settrace(come_again)
    try:
        assert raise_signals("torchrun", SIGINT) == (Decision.INTERRUPT, [STOPPING])
    finally:
        sys.settrace(before)
    assert not left, "the second signal came"


def test_one_key_press_counts_once_however_often_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 60.0)
    for launcher in ("plain", "torchrun", "deepspeed", "mpirun"):
        assert raise_signals(launcher, SIGINT, SIGINT, SIGTERM) == (Decision.INTERRUPT, [STOPPING])


def test_what_signals_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_SECONDS", 0.0)
    assert raise_signals("plain") == (Decision.GO_ON, [])
    for number in (SIGTERM, SIGUSR1):
        assert raise_signals("plain", number, number) == (Decision.SIGNAL, [])
    for launcher, first, second in (("plain", SIGTERM, SIGINT), ("deepspeed", SIGINT, SIGTERM)):
        assert raise_signals(launcher, first, second) == (Decision.INTERRUPT, [STOPPING])
    for launcher, second in (("plain", SIGINT), ("torchrun", SIGTERM)):  # a second press ends at once
        with pytest.raises(KeyboardInterrupt):
            raise_signals(launcher, SIGINT, second)


def test_outside_of_training_ctrl_c_is_as_it_was() -> None:
    signal.signal(SIGINT, signal.default_int_handler)
    with Control(World()) as control:
        with control.interruptible(print):
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(SIGINT)


@pytest.mark.parametrize(("seconds", "votes"), [(0.001, 1), (0.05, 8), (2.0, 40)])
def test_ranks_ask_one_another_by_the_clock(seconds: float, votes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand ranks a vote takes longer than a small micro-batch."""
    counted: list[Tensor] = []
    now = [0.0]

    def count(vote: Tensor, _: object) -> Tensor:
        counted.append(vote)
        return vote

    with Control(World()) as control:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(stopping, "find_greatest", count)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        control.decide(wrong=False, saving=0.0)
        for _ in range(40):
            now[0] += seconds
            assert not control.stop_requested_anywhere()
        assert 1 <= len(counted) - 1 <= votes
        signal.raise_signal(SIGUSR1)
        heard_at = now[0]
        while not control.stop_requested_anywhere():
            now[0] += seconds
        assert now[0] - heard_at <= max(1.0, seconds)
