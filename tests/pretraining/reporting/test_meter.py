"""What a run tells about itself: exact sums over steps and ranks, files without a step twice, lines one can read."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.processes import ROOT, spawn

from data_prep.common.errors import UserError
from pretraining.processes.group import connect, disconnect
from pretraining.processes.launchers import find_world
from pretraining.reporting import meter as metrics
from pretraining.reporting import run_log
from pretraining.reporting.console import number, step_line
from pretraining.reporting.hardware import matrix_rate, peak_memory
from pretraining.reporting.meter import Meter, Stopwatch
from pretraining.reporting.records import EvaluationRecord, StepRecord
from pretraining.reporting.run_log import METRICS, TENSORBOARD, RunLog, cut_metrics

CPU = torch.device("cpu")
RECORD = StepRecord(
    step=12000,
    phase=1,
    loss=6.5321,
    masked=5.842,
    next_sentence=0.6901,
    masked_accuracy=0.123,
    next_sentence_accuracy=0.551,
    learning_rate=1e-4,
    gradient_norm=1.234,
    loss_scale=None,
    pieces_per_second=123456.0,
    padded_per_second=150000.0,
    utilisation=0.613,
    waiting=0.003,
    memory=3_200_000_000,
    seconds=2.5,
    seconds_left=7400.0,
)
SCORES = EvaluationRecord(12000, 1, 5.8, 0.69, 0.12, 0.55, 1000, 3.0)


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sums(masked: float, following: float, masked_right: int, next_right: int) -> list[torch.Tensor]:
    return [
        torch.tensor(float(masked), requires_grad=True),
        torch.tensor(following),
        torch.tensor(masked_right),
        torch.tensor(next_right),
    ]


def test_losses_are_means_over_all_predictions_of_the_interval() -> None:
    clock = Clock()
    meter = Meter(CPU, ceiling=1000.0, watch=Stopwatch(clock=clock))
    meter.add(sums(10.0, 2.0, 1, 3), predictions=2, sequences=4, pieces=300, padded=500, flops=2000.0)
    meter.add(sums(20.0, 1.0, 2, 1), predictions=8, sequences=2, pieces=100, padded=100, flops=1000.0)
    meter.step(waited=1.0)
    clock.now += 10.0
    record = meter.flush(step=7, phase=2, learning_rate=1e-4, gradient_norm=torch.tensor(1.5), flops_left=6000.0)
    assert (record.step, record.phase, record.learning_rate, record.gradient_norm) == (7, 2, 1e-4, 1.5)
    assert record.masked == pytest.approx(30 / 10)
    assert record.next_sentence == pytest.approx(3 / 6)
    assert record.loss == pytest.approx(3.5)
    assert record.masked_accuracy == pytest.approx(3 / 10)
    assert record.next_sentence_accuracy == pytest.approx(4 / 6)
    assert (record.pieces_per_second, record.padded_per_second) == (40.0, 60.0)
    assert record.utilisation == pytest.approx(3000 / 10 / 1000)
    assert (record.waiting, record.seconds) == (pytest.approx(0.1), 10.0)
    assert record.seconds_left == pytest.approx(20.0)
    assert record.memory == pytest.approx(peak_memory(CPU), rel=0.1)


def test_an_interval_starts_from_nothing() -> None:
    clock = Clock()
    meter = Meter(CPU, watch=Stopwatch(clock=clock))
    for step in (1, 2):
        for _ in range(step):
            meter.add(sums(step, 0.0, 0, 0), predictions=1, sequences=1, pieces=10, padded=10, flops=1.0)
            meter.step()
        clock.now += 4.0
        record = meter.flush(step=step, phase=1, learning_rate=0.0)
        assert record.masked == step
        assert record.seconds == 4.0 / step
        assert (record.utilisation, record.seconds_left) == (None, None)


def test_time_in_pauses_is_not_counted() -> None:
    clock = Clock()
    watch = Stopwatch(clock=clock)
    clock.now += 2.0
    with watch.pause():
        clock.now += 50.0
    clock.now += 1.0
    assert watch.lap() == pytest.approx(3.0)
    clock.now += 5.0
    assert watch.lap() == pytest.approx(5.0)


def test_the_time_left_follows_the_newest_pace() -> None:
    clock = Clock()
    meter = Meter(CPU, watch=Stopwatch(clock=clock))
    left = []
    for seconds in [1.0] + [2.0] * 12:
        meter.add(sums(0.0, 0.0, 0, 0), predictions=1, sequences=1, pieces=1, padded=1, flops=10.0)
        clock.now += seconds
        left.append(meter.flush(step=1, phase=1, learning_rate=0.0, flops_left=100.0).seconds_left or 0)
    assert left[0] == pytest.approx(10.0)
    assert 10.0 < left[1] < 20.0
    assert left[-1] == pytest.approx(20.0, rel=0.02)


def two_ranks_measure() -> StepRecord:
    ranks = find_world(os.environ)
    connect(ranks, CPU, timeout=60)
    clock = Clock()
    meter = Meter(CPU, ceiling=500.0, watch=Stopwatch(clock=clock))
    masked, predictions = ((10.0, 2), (50.0, 18))[ranks.rank]  # the mean of the ranks' means would be wrong
    meter.add(sums(masked, 1.0, 1, 1), predictions=predictions, sequences=2, pieces=100, padded=128, flops=1000.0)
    meter.step(waited=(0.0, 4.0)[ranks.rank])
    setattr(metrics, "peak_memory", lambda device: (5000, 7000)[ranks.rank])  # noqa: B010
    clock.now += 10.0
    record = meter.flush(step=1, phase=1, learning_rate=0.0)
    disconnect()
    return record


def test_figures_are_those_of_all_ranks() -> None:
    first, second = (each.result for each in spawn(2, two_ranks_measure))
    assert first == second
    assert (first.masked, first.next_sentence) == (60 / 20, 2 / 4)
    assert (first.pieces_per_second, first.padded_per_second) == (20.0, 25.6)
    assert first.utilisation == pytest.approx(2000 / 10 / 1000)
    assert first.waiting == pytest.approx(0.2)
    assert first.memory == 7000


def test_the_matrix_rate_is_that_of_matrix_products() -> None:
    """A number that some computer could have, not one a thousand times off."""
    assert 1e8 < matrix_rate(CPU, torch.float32, budget=0.2) < 1e14
    assert 1e8 < matrix_rate(CPU, torch.bfloat16, budget=0.2) < 1e15


def test_peak_memory_is_this_program_s() -> None:
    before = peak_memory(CPU)
    block = bytearray(os.urandom(1)) * (before + 200_000_000)
    assert peak_memory(CPU) > before + 150_000_000
    del block
    done = subprocess.run(
        [sys.executable, "-c", "from pretraining.reporting.meter import *; print(peak_memory(torch.device('cpu')))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert int(done.stdout) < before + 150_000_000  # not what the program held that started it


# Files


def open_log(folder: Path, console: Console | None = None, **options: object) -> RunLog:
    quiet = console or Console(file=io.StringIO())
    return RunLog(folder, quiet, total_steps=900_000, **{"tensorboard": False, **options})  # type: ignore[arg-type]


def read_lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_each_record_is_a_line_of_json_at_once(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(RECORD)
        [line] = read_lines(tmp_path)  # before the end
        assert (line["kind"], line["step"], line["masked"], line["loss_scale"]) == ("step", 12000, 5.842, None)
        log.evaluation(SCORES)
        log.step(replace(RECORD, step=12001, loss=float("nan")))
    _, scores, broken = read_lines(tmp_path)
    assert scores["kind"] == "evaluation"
    assert scores["perplexity"] == pytest.approx(330.2996)
    assert broken["loss"] is None  # JSON has no NaN


def test_a_run_that_goes_on_has_no_step_twice(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in range(5, 40, 5):
            log.step(replace(RECORD, step=step))
            log.evaluation(replace(SCORES, step=step))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')  # killed in the middle of a line
    with open_log(tmp_path, first_step=21) as log:
        log.step(replace(RECORD, step=25))
    assert [line["step"] for line in read_lines(tmp_path)] == [5, 5, 10, 10, 15, 15, 20, 20, 25]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_damaged_line_is_named_and_left(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: no record of a step"):
        cut_metrics(path, 2)
    assert path.read_text().count("\n") == 3


def test_ranks_other_than_0_write_nothing(tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output), active=False) as log:
        log.step(RECORD)
        log.evaluation(SCORES)
        log.say("hello")
    assert not list(tmp_path.iterdir())
    assert output.getvalue() == ""


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_log(tmp_path, tensorboard=True) as log:
        for step in (10, 20, 30):
            log.step(replace(RECORD, step=step, loss=1.0))
    with open_log(tmp_path, tensorboard=True, first_step=21) as log:
        log.step(replace(RECORD, step=30, loss=2.0))
        log.evaluation(replace(SCORES, step=30))
    found = events.EventAccumulator(str(tmp_path / TENSORBOARD))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(10, 1.0), (20, 1.0), (30, 2.0)]
    assert {"train/learning_rate", "train/utilisation", "validation/perplexity"} <= set(found.Tags()["scalars"])


def test_without_tensorboard_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"), open_log(tmp_path, tensorboard=True):
        pass


# What cannot be written

SCRIPT = """
import resource, sys
from pathlib import Path
from rich.console import Console
from test_meter import RECORD, open_log, replace
from data_prep.common.errors import UserError
try:
    with open_log(Path(sys.argv[1]), Console(), tensorboard=sys.argv[2] == "tensorboard") as log:
        if sys.argv[2] != "pipe":
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        for step in range(100_000):
            log.step(replace(RECORD, step=step))
except UserError as error:
    print("told:", error, file=sys.stderr)
    sys.exit(2)
"""


def start_script(folder: Path, how: str) -> subprocess.Popen[str]:
    paths = f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_a_closed_pipe_is_told(tmp_path: Path) -> None:
    process = start_script(tmp_path, "pipe")
    assert process.stdout is not None
    assert process.stderr is not None
    assert "loss 6.5321" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 2
    errors = process.stderr.read()
    assert errors.startswith("told: the console: cannot be written")
    assert "Traceback" not in errors


@pytest.mark.parametrize("how", ["plain", "tensorboard"])
def test_a_full_disk_is_told(how: str, tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    process = start_script(tmp_path, how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2, errors
    assert f"told: {tmp_path}" in errors
    assert ": cannot be written: File too large" in errors
    assert how == "tensorboard" or "Traceback" not in errors  # its writer's thread prints one
    cut_metrics(tmp_path / METRICS, 100_000)
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(len(read_lines(tmp_path))))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be written: No such file"), open_log(tmp_path / "no"):
        pass


# The console


def test_a_line_a_step_where_there_is_no_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output, width=80)) as log:
        log.step(RECORD)
        log.evaluation(SCORES)
    step, scores = output.getvalue().splitlines()
    assert step == step_line(RECORD, 900_000)
    assert len(step) <= 140
    assert "12000/900000  loss 6.5321  masked 5.8420 12.3%" in step
    assert step.endswith("123k pieces/s  use 61%  wait 0%  2 h 03 m left")
    assert scores.startswith("validation 12000: masked 5.8000 12.0%  perplexity 330.30")


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_three_lines_that_fit(width: int, tmp_path: Path) -> None:
    output = io.StringIO()
    with open_log(tmp_path, Console(file=output, force_terminal=True, width=width, color_system=None), phases=2) as log:
        log.step(replace(RECORD, loss_scale=65536.0))
        log.say("saved")
    text = output.getvalue()
    shown = [line for line in text.replace("\x1b[2K", "").replace("\x1b[1A", "").splitlines() if "\x1b" not in line]
    assert "phase 1 of 2  step 12,000 of 900,000" in text
    assert "2 h 03 m left" in text
    assert "scale 65536" in text
    assert "3.2 GB" in text
    assert "saved" in text
    assert max(map(len, shown)) <= width
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is there again


def test_numbers_as_people_read_them() -> None:
    assert [number(value) for value in (7.4, 999, 12345, 4.561e6, 123.4e9)] == ["7", "999", "12.3k", "4.56M", "123G"]
