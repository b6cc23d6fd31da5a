"""What training does and its hardware can do, measured exactly: sums over steps and ranks, time without pauses."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.processes import ROOT
from support.records import RECORD
from support.training import run_connected

from data_prep.common.capacity import read_memory_limits
from pretraining.objectives.declaration import COUNTS
from pretraining.objectives.mlm import OBJECTIVE as MLM
from pretraining.objectives.mlm import Losses
from pretraining.reporting import hardware
from pretraining.reporting import meter as metrics
from pretraining.reporting.hardware import measure_flops, read_peak_memory, read_total_memory
from pretraining.reporting.meter import Meter, Speed, Stopwatch

CPU = torch.device("cpu")


class Clock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_meter(clock: Clock, device: torch.device = CPU, **more: Any) -> Meter:
    return Meter(device, Losses._fields, COUNTS, watch=Stopwatch(clock=clock), **more)


def add(meter: Meter, sums: Sequence[float], device: torch.device = CPU, **given: Any) -> None:
    """Adds a micro-batch: losses of masked pieces and next sentences, right ones of both, and random ones."""
    first = torch.tensor(float(sums[0]), requires_grad=True)
    both = [each.to(device) for each in (first, *map(torch.tensor, sums[1:]))]
    usual = {"predictions": 1, "sequences": 1, "pieces": 10, "padded": 10, "flops": 1.0}
    meter.add(both, **{**usual, **given})


def test_losses_are_means_over_all_predictions_of_the_interval() -> None:
    clock = Clock()
    meter = make_meter(clock, ceiling=1000.0)
    add(meter, (10.0, 2.0, 1, 3, 1), predictions=2, sequences=4, pieces=300, padded=500, flops=2000.0)
    add(meter, (20.0, 1.0, 2, 1, 0), predictions=8, sequences=2, pieces=100, padded=100, flops=1000.0)
    meter.step(1e-4, waited=1.0)
    clock.now += 10.0
    totals, speed = meter.flush(flops_left=6000.0)
    figures = MLM.measure(totals)
    said = MLM.describe_figures(figures)
    record = replace(RECORD, loss=MLM.total(figures), learns=figures, said=said, speed=speed)
    assert record.learns["masked_loss"] == pytest.approx(30 / 10)
    assert (record.learns["next_loss"], record.loss) == pytest.approx((3 / 6, 3.5))
    assert record.learns["masked_accuracy"] == pytest.approx(3 / 10)
    assert record.learns["next_accuracy"] == pytest.approx(4 / 6)
    assert record.figures()["next_larger_class"] == pytest.approx(5 / 6)  # 5 of the 6 were no random next
    assert "66.7% (larger class 83.3%)" in record.line()
    assert (speed.pieces_per_second, speed.padded_pieces_per_second) == (40.0, 60.0)
    assert speed.flops_utilisation == pytest.approx(3000 / 10 / 1000)
    assert (speed.waiting_for_data, speed.seconds_per_step) == pytest.approx((0.1, 10.0))
    assert speed.seconds_left == pytest.approx(20.0)
    assert speed.peak_memory_bytes == pytest.approx(read_peak_memory(CPU), rel=0.1)


def test_an_interval_starts_from_nothing() -> None:
    clock = Clock()
    meter = make_meter(clock)
    for step in (1, 2):
        for _ in range(step):
            add(meter, (step, 0.0, 0, 0, 1))
            meter.step(1e-4)
        clock.now += 4.0
        totals, speed = meter.flush()
        assert MLM.measure(totals)["masked_loss"] == step
        assert (speed.seconds_per_step, speed.flops_utilisation, speed.seconds_left) == (4.0 / step, None, None)


def test_an_interval_goes_on_where_a_checkpoint_was_made() -> None:
    clock = Clock()
    straight, stopped = make_meter(clock), make_meter(clock)
    for meter in (straight, stopped):
        meter.begin()
    for step in range(3):
        clock.now += 4.0
        if step == 2:
            state, stopped = stopped.state(), make_meter(clock)
            stopped.restore([state], 0, 1)
            stopped.begin()
        for meter in (straight, stopped):
            add(meter, (step, 1.0, 1, 1, 1), predictions=2)
            meter.step(1e-4)
    clock.now += 1.0
    found = [meter.flush() for meter in (straight, stopped)]
    one, other = ((totals, speed.seconds_per_step, speed.pieces_per_second) for totals, speed in found)
    assert one == other
    assert one[1] == pytest.approx(13.0 / 3)


def test_losses_by_parts_of_the_data_go_on_by_their_names() -> None:
    """Also where a checkpoint knows none or fewer of them; a part without predictions has no loss."""
    earlier, later = make_meter(Clock(), parts=["books", "wiki"]), make_meter(Clock(), parts=["books", "code", "wiki"])
    earlier.add_parts([torch.tensor([1.0, 5.0]), torch.tensor([3.0])], np.array([1, 0, 1]))
    assert "parts" not in make_meter(Clock()).state()
    for state in (earlier.state(), make_meter(Clock()).state()):
        later.restore([state], 0, 1)
    later.add_parts([torch.tensor([8.0])], np.array([2]))
    later.flush()
    assert later.part_losses == {"books": 5.0, "wiki": 4.0}
    later.flush()
    assert not later.part_losses


def test_progress_is_reckoned_without_waiting_for_the_device() -> None:
    """Whatever is added up there stays there: nothing can be read of a meta device."""
    clock, device = Clock(), torch.device("meta")
    meter = make_meter(clock, device)
    assert meter.estimate(100.0, None) == (None, None)
    add(meter, (1.0, 1.0, 1, 1, 1), device, pieces=30, padded=40, flops=10.0)
    meter.step(1e-4)
    clock.now += 2.0
    assert (meter.estimate(100.0, None), meter.estimate(None, 7.0)) == ((15.0, 20.0), (15.0, 7.0))


def test_time_in_pauses_is_not_counted_and_a_pause_within_one_is_a_part_of_it() -> None:
    clock = Clock()
    watch = Stopwatch(clock=clock)
    clock.now += 2.0
    with watch.pause():
        clock.now += 30.0
        with watch.pause():
            clock.now += 20.0
        clock.now += 10.0
        assert watch.elapsed() == pytest.approx(2.0)
    clock.now += 1.0
    assert (watch.elapsed(), watch.lap()) == pytest.approx((3.0, 3.0))
    clock.now += 5.0
    assert watch.lap() == pytest.approx(5.0)


def test_the_time_left_follows_the_newest_pace() -> None:
    clock = Clock()
    meter = make_meter(clock)
    left = []
    for seconds in [1.0] + [2.0] * 12:
        add(meter, (0.0, 0.0, 0, 0, 1), flops=10.0)
        clock.now += seconds
        left.append(meter.flush(flops_left=100.0)[1].seconds_left or 0)
    assert left[0] == pytest.approx(10.0)
    assert 10.0 < left[1] < 20.0
    assert left[-1] == pytest.approx(20.0, rel=0.02)


def two_ranks_measure() -> tuple[dict[str, float], Speed]:
    rank, clock = dist.get_rank(), Clock()
    meter = make_meter(clock, ceiling=500.0)
    masked, predictions = ((10.0, 2), (50.0, 18))[rank]  # the mean of the ranks' means would be wrong
    add(meter, (masked, 1.0, 1, 1, 1), predictions=predictions, sequences=2, pieces=100, padded=128, flops=1000.0)
    meter.step(1e-4, waited=(0.0, 4.0)[rank])
    setattr(metrics, "read_peak_memory", lambda _: (5000, 7000)[rank])  # noqa: B010
    clock.now += 10.0
    return meter.flush()


def test_figures_are_those_of_all_ranks() -> None:
    first, second = run_connected(2, two_ranks_measure)
    assert first == second
    totals, speed = first
    losses = MLM.measure(totals)
    assert (losses["masked_loss"], losses["next_loss"]) == (60 / 20, 2 / 4)
    assert (speed.pieces_per_second, speed.padded_pieces_per_second) == (20.0, 25.6)
    assert speed.flops_utilisation == pytest.approx(2000 / 10 / 1000)
    assert (speed.waiting_for_data, speed.peak_memory_bytes) == (pytest.approx(0.2), 7000)


def test_the_matrix_rate_is_that_of_matrix_products() -> None:
    """A number that some computer could have, not one a thousand times off."""
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e8 < hardware._measure_product(CPU, dtype, (256, 128, 256), budget=0.0) < 1e15


def test_the_matrix_rate_is_the_best_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that is busy for a moment does not lower it. Without time there is one round."""
    rates = iter([3.0, 1.0, 2.0, 2.0, 9.0, 8.0, *[2.0] * 100])
    monkeypatch.setattr(hardware, "_measure_product", lambda *_: next(rates))
    assert measure_flops(CPU, torch.float32, budget=0.0) == 3.0
    assert measure_flops(CPU, torch.float32) == 9.0


SCRIPT = """
import subprocess, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # which takes seconds, and is not needed
from pretraining.reporting.hardware import read_peak_memory
cpu = types.SimpleNamespace(type="cpu")
print(read_peak_memory(cpu), flush=True)
if len(sys.argv) == 1:
    block = b"x" * 200_000_000
    print(read_peak_memory(cpu), flush=True)
    subprocess.run([sys.executable, __file__, "child"])
"""


def test_peak_memory_is_this_program_s(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, tmp_path / "script.py"], env=environment)
    before, after, of_child = map(int, printed.split())
    assert after > before + 150_000_000
    assert of_child < before + 50_000_000, "not what the program held that started it"


def test_the_memory_is_what_the_container_or_job_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the limits of all groups that this process is in, one within another."""
    (tmp_path / "slurm/job").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/other\n0::/slurm/job\n")
    monkeypatch.setattr(hardware, "read_memory_limits", partial(read_memory_limits, tmp_path, tmp_path))
    whole = read_total_memory(CPU)
    assert 1e8 < whole < 1e15
    limits = {"": "max", "slurm": f"{whole // 2}", "slurm/job": f"{whole // 3}"}
    for (folder, limit), least in zip(limits.items(), (whole, whole // 2, whole // 3), strict=True):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        assert read_total_memory(CPU) == least
