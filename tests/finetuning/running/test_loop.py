"""A run of fine-tuning: the same however it is stopped, on any ranks and in any micro-batches."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import correlation
from typing import Any

import pytest
from support.finetuning import (
    STEPS,
    Toy,
    fine_tune,
    kill_at,
    launch,
    metrics,
    outcome,
    results,
    slow_steps,
    stop_at,
    stop_within_scoring,
    stop_within_step,
    write_rows,
)
from support.marks import slow
from support.processes import wait_for
from support.training import assert_ended, assert_well

from pretraining.processes.ending import Code
from pretraining.processes.stopping import ECHO_SECONDS

MICRO = ["--micro_batch", "2"]
STOPS: list[tuple[int, Callable[[], None]]] = [
    (2, partial(stop_at, 2)),
    (3, partial(stop_within_step, 2)),
    (5, partial(stop_within_scoring, 5, "dev")),
    (6, partial(stop_at, 6)),
    (10, partial(stop_at, STEPS)),
    (10, partial(stop_within_scoring, STEPS, "dev")),
    (10, partial(stop_within_scoring, STEPS, "test")),
]
"""After which step a run is saved: between two lines of the log, within a step, in every kind of evaluation, and at the
end before anything is scored."""
FEW_STOPS = [(1, partial(stop_within_step, 2)), STOPS[2]]
RUN = Path("toy") / "lr0.003-seed1"
WAYS = {"fp32": [], "bf16": ["--precision.dtype", "bf16"], "ZeRO 2": ["--parallel.zero", "2"]}
BEST = ["--patience", "2", "--epochs", "8", "--evaluations", "2"]


def run_straight(toy: Toy, *more: object, ranks: int = 1, out: str = "straight") -> dict[str, Any]:
    assert_well(fine_tune(toy.command(out, *more), ranks))
    return outcome(toy.folder / out)


def stop(toy: Toy, step: int, fault: Callable[[], None], *more: object, ranks: int = 1) -> None:
    run = launch(toy.command("stopped", *more), ranks, fault)
    assert_ended(run, Code.STOPPED, f"after step {step}, and saved; the same command continues from there")


@pytest.mark.parametrize(
    ("way", "ranks", "stops"),
    [("fp32", 2, FEW_STOPS), *(slow(way, ranks, STOPS) for way in WAYS for ranks in (1, 2))],
    ids=lambda value: f"{len(value)} stops" if isinstance(value, list) else None,
)
def test_a_stopped_run_is_the_straight_one_bit_for_bit(
    toy: Toy, way: str, ranks: int, stops: list[tuple[int, Callable[[], None]]]
) -> None:
    more = [*MICRO, *WAYS[way]]
    wanted = run_straight(toy, *more, ranks=ranks)
    for step, fault in stops:
        stop(toy, step, fault, *more, ranks=ranks)
    assert_well(fine_tune(toy.command("stopped", *more), ranks))
    assert outcome(toy.folder / "stopped") == wanted
    assert not list(toy.folder.rglob("checkpoints"))
    assert [line["step"] for line in metrics(toy.folder / "stopped" / RUN / "metrics.jsonl")] == [3, 5, 5, 6, 9, 10, 10]


def test_a_killed_run_goes_on_from_its_last_checkpoint(toy: Toy, straight_toy: dict[str, Any]) -> None:
    for step in (5, 9):
        run = launch(toy.command("killed", "--checkpoints.every", "2"), fault=partial(kill_at, step))
        assert [rank.code for rank in run.wait()] == [-signal.SIGKILL]
    said = assert_well(fine_tune(toy.command("killed", "--checkpoints.every", "2")))
    assert outcome(toy.folder / "killed") == straight_toy
    assert "4/10" not in said  # the second kill left a later checkpoint than the first
    assert not list(toy.folder.rglob("checkpoints"))


def test_an_early_stop_keeps_the_best_weights(toy: Toy, tmp_path: Path) -> None:
    """Also where it is stopped between the best weights and the end. A correlation tells the evaluations apart."""
    toy = with_numbers(toy, tmp_path / "numbers")
    wanted = run_straight(toy, *BEST)
    run = toy.folder / "straight" / RUN
    scored = [line for line in metrics(run / "metrics.jsonl") if line["kind"] == "scores"]
    found = [line["dev/pearson"] for line in scored]
    best = found.index(max(found))
    assert len(found) == best + 3 < 16  # two evaluations without a better one, and no more
    told = results(toy.folder / "straight")
    assert told["score"] == max(found)
    assert told["scores"]["dev"]["pearson"] == pytest.approx(correlation_of_predictions(toy), abs=1e-4)
    step = scored[best + 1]["step"]
    stop(toy, step, partial(stop_at, step), *BEST)
    assert_well(fine_tune(toy.command("stopped", *BEST)))
    assert outcome(toy.folder / "stopped") == wanted


def with_numbers(toy: Toy, data: Path) -> Toy:
    """The toy task with a year for every text, which nothing in it tells."""
    shutil.copytree(toy.data, data)
    task = (data / "toy.toml").read_text()
    (data / "toy.toml").write_text(task.replace("classes", "score"))
    draw = random.Random(3)
    for name in ("train.tsv", "dev.tsv"):
        texts = [line.split("\t")[0] for line in (data / name).read_text().splitlines()[1:]]
        write_rows(data / name, [(text, f"{draw.uniform(1776, 1912):.1f}") for text in texts])
    return dataclasses.replace(toy, data=data)


def correlation_of_predictions(toy: Toy) -> float:
    """What the file of predictions on dev is worth, by the labels."""
    predictions = toy.folder / "straight" / "toy" / "predictions" / "predictions_dev.tsv"
    labels, said = (
        [float(line.split("\t")[1]) for line in path.read_text().splitlines()[1:]]
        for path in (toy.data / "dev.tsv", predictions)
    )
    return correlation(labels, said)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, "3"), slow(1, "3"), slow(2, "8"), slow(3, "1")])
def test_ranks_and_micro_batches_change_nothing_but_rounding(
    toy: Toy, straight_toy: dict[str, Any], ranks: int, micro_batch: str
) -> None:
    found = run_straight(toy, "--micro_batch", micro_batch, ranks=ranks)
    assert found["toy/results.json"]["scores"] == straight_toy["toy/results.json"]["scores"]
    lines, straight = (each[str(RUN / "metrics.jsonl")] for each in (found, straight_toy))
    assert [line["kind"] for line in lines] == [line["kind"] for line in straight]
    for ours, wanted in zip(lines, straight, strict=True):
        assert {**ours, "kind": 0} == pytest.approx({**wanted, "kind": 0}, rel=2e-5)


def test_ctrl_c_saves_and_a_second_one_ends_at_once(toy: Toy, straight_toy: dict[str, Any]) -> None:
    run = launch(toy.command("stopped"), fault=partial(stop_at, 3, signal.SIGINT))
    assert_ended(run, Code.INTERRUPTED, "stopped by Ctrl-C after step 3, and saved")
    assert "press Ctrl-C again to end at once" in run.done()[0].output
    run = launch(toy.command("stopped", "--logging.every", "1"), fault=partial(slow_steps, 2.0))
    wait_for(lambda: "4/10" in run.done()[0].output)
    run.signal(signal.SIGINT)
    wait_for(lambda: "press Ctrl-C" in run.done()[0].output)
    time.sleep(ECHO_SECONDS + 0.1)
    run.signal(signal.SIGINT)
    assert_ended(run, Code.INTERRUPTED, "interrupted; the same command goes on from the last checkpoint")
    assert_well(fine_tune(toy.command("stopped")))
    assert outcome(toy.folder / "stopped") == straight_toy


def test_a_loss_that_is_no_number_fails_the_run_and_no_other(toy: Toy) -> None:
    command = toy.command("grid", "--learning-rates", "1e30", "3e-3")
    said = assert_well(fine_tune(command))
    told = results(toy.folder / "grid")
    assert told["failed"] == ["lr1e+30-seed1"]
    assert told["runs"]["lr1e+30-seed1"]["settings"]["learning_rate"] == 1e30
    assert told["best"] == "lr0.003-seed1"
    assert "take a smaller learning rate" in told["runs"]["lr1e+30-seed1"]["failed"]
    assert "lr1e+30-seed1  failed: " in said
    assert "1 of 2 runs: failed: lr1e+30-seed1" in said
    assert f"toy: the best model is in {toy.folder / 'grid' / 'toy' / 'model'}\n" in said
    assert not list(toy.folder.rglob("checkpoints"))
    assert "no step" not in assert_well(fine_tune(command))  # it is not tried again


def test_where_all_runs_fail_the_command_does(toy: Toy) -> None:
    """Here nothing but the scores tells of it: the loss of the only logged step was computed before its update."""
    command = toy.command("grid", "--learning-rates", "1e30", "--epochs", "0.2")
    errors = assert_ended(launch(command), 2, "error: toy: no run has a score")
    assert str(toy.folder / "grid" / "results.json") in errors
    assert (
        "is no number"
        in json.loads((toy.folder / "grid" / "results.json").read_text())["toy"]["runs"]["lr1e+30-seed1"]["failed"]
    )
    assert not (toy.folder / "grid" / "toy" / "model").exists()
