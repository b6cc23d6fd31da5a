"""A run of fine-tuning: the same however it is stopped, on any ranks and in any micro-batches; scores of a fine-tuned
model without training; and a GPU, which scores as a CPU."""

import dataclasses
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import correlation
from typing import Any

import pytest
import torch
from support import finetuning as tuning
from support.commands import wait_for
from support.finetuning import Toy, Tune, fine_tune, launch, metrics, outcome, read_column, results
from support.marks import slow
from support.processes import ROOT
from support.training import assert_ended, assert_well

from finetuning.prediction import load
from pretraining.processes import stopping
from pretraining.processes.ending import Code

MICRO = ["--micro_batch", "3"]
Stops = list[tuple[int, Callable[[], None]]]
STOPS: Stops = [(2, partial(tuning.stop_at, 2)), (3, partial(tuning.stop_within_step, 2))]
STOPS += [(5, partial(tuning.stop_within_scoring, 5, "dev"))]
STOPS += [(step, partial(tuning.stop_at, step)) for step in (6, tuning.STEPS)]
STOPS += [(10, partial(tuning.stop_within_scoring, tuning.STEPS, split)) for split in ("dev", "test")]
"""After which step a run is saved: between two lines of the log, within a step, in every kind of evaluation, and at the
end before anything is scored."""
FEW_STOPS: Stops = [(1, partial(tuning.stop_within_step, 2))]
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
    [("fp32", 2, FEW_STOPS), *(slow(way, 1 + (way == "ZeRO 2"), STOPS) for way in WAYS)],
    ids=lambda value: f"{len(value)} stops" if isinstance(value, list) else None,
)
def test_a_stopped_run_is_the_straight_one_bit_for_bit(
    toy: Toy, straight_toy: dict[str, Any], way: str, ranks: int, stops: Stops
) -> None:
    """And in fp32 the ranks and the micro-batches, which are not of one size, change nothing but rounding."""
    more = [*MICRO, *WAYS[way]]
    wanted = run_straight(toy, *more, ranks=ranks)
    if way != "bf16":
        assert_same_but_rounding(wanted, straight_toy)
    for step, fault in stops:
        stop(toy, step, fault, *more, ranks=ranks)
    assert_well(fine_tune(toy.command("stopped", *more), ranks))
    assert outcome(toy.folder / "stopped") == wanted
    assert not list(toy.folder.rglob("checkpoints"))
    assert [line["step"] for line in metrics(toy.folder / "stopped" / RUN / "metrics.jsonl")] == [3, 5, 5, 6, 9, 10, 10]


def test_a_killed_run_goes_on_from_its_last_checkpoint(toy: Toy, straight_toy: dict[str, Any]) -> None:
    for step in (5, 9):
        run = launch(toy.command("killed", "--checkpoints.every", "2"), fault=partial(tuning.kill_at, step))
        assert [rank.code for rank in run.wait()] == [-signal.SIGKILL]
    said = assert_well(fine_tune(toy.command("killed", "--checkpoints.every", "2")))
    assert outcome(toy.folder / "killed") == straight_toy
    assert "4/10" not in said  # the second kill left a later checkpoint than the first
    assert not list(toy.folder.rglob("checkpoints"))


@pytest.mark.slow
def test_an_early_stop_keeps_the_best_weights(toy: Toy, tmp_path: Path) -> None:
    """Also where it is stopped between the best weights and the end. A correlation tells the evaluations apart."""
    toy = with_numbers(toy, tmp_path / "numbers")
    wanted = run_straight(toy, *BEST)
    run = toy.folder / "straight" / RUN
    scored = [line for line in metrics(run / "metrics.jsonl") if line["kind"] == "scores"]
    found = [line["dev/pearson"] for line in scored]
    best = found.index(max(found))
    assert len(found) == best + 3 < 16  # two evaluations without a better one, and no more
    predictions = toy.folder / "straight" / "toy" / "predictions" / "predictions_dev.tsv"
    said, right = ([*map(float, read_column(path, 1))] for path in (predictions, toy.data / "dev.tsv"))
    told = results(toy.folder / "straight")
    assert told["score"] == max(found)
    assert told["scores"]["dev"]["pearson"] == pytest.approx(correlation(said, right), abs=1e-4)
    step = scored[best + 1]["step"]
    stop(toy, step, partial(tuning.stop_at, step), *BEST)
    assert_well(fine_tune(toy.command("stopped", *BEST)))
    assert outcome(toy.folder / "stopped") == wanted


def with_numbers(toy: Toy, data: Path) -> Toy:
    """The toy task with a year for every text, which nothing in it tells."""
    shutil.copytree(toy.data, data)
    (data / "toy.toml").write_text((data / "toy.toml").read_text().replace("classes", "score"))
    draw = random.Random(3)
    for name in ("train.tsv", "dev.tsv"):
        tuning.write_rows(
            data / name, [(text, f"{draw.uniform(1776, 1912):.1f}") for text in read_column(data / name, 0)]
        )
    return dataclasses.replace(toy, data=data)


def assert_same_but_rounding(found: dict[str, Any], straight: dict[str, Any]) -> None:
    assert found["toy/results.json"]["scores"] == straight["toy/results.json"]["scores"]
    ours, wanted = (each[str(RUN / "metrics.jsonl")] for each in (found, straight))
    assert [line["kind"] for line in ours] == [line["kind"] for line in wanted]
    for one, other in zip(ours, wanted, strict=True):
        assert {**one, "kind": 0} == pytest.approx({**other, "kind": 0}, rel=2e-5)


def hang_at_once() -> None:
    """A fault: no step ends, and a second Ctrl-C counts however soon it comes."""
    stopping.ECHO_SECONDS = 0.0
    tuning.slow_steps(60.0)


def test_ctrl_c_saves_and_a_second_one_ends_at_once(toy: Toy, straight_toy: dict[str, Any]) -> None:
    run = launch(toy.command("stopped"), fault=partial(tuning.stop_at, 3, signal.SIGINT))
    assert_ended(run, Code.INTERRUPTED, "stopped by Ctrl-C after step 3, and saved")
    assert "press Ctrl-C again to end at once" in run.done()[0].output
    run = launch(toy.command("stopped"), fault=hang_at_once)
    wait_for(lambda: "a slow step" in run.done()[0].output)
    run.signal(signal.SIGINT)
    wait_for(lambda: "press Ctrl-C" in run.done()[0].output)
    run.signal(signal.SIGINT)
    assert_ended(run, Code.INTERRUPTED, "interrupted; the same command continues from the last checkpoint")
    assert_well(fine_tune(toy.command("stopped")))
    assert outcome(toy.folder / "stopped") == straight_toy


@pytest.mark.slow
def test_a_loss_that_is_no_number_fails_the_run_and_no_other(toy: Toy) -> None:
    command = toy.command("grid", "--search.learning_rates", "[1e30, 3e-3]")
    said = assert_well(fine_tune(command))
    told = results(toy.folder / "grid")
    assert (told["failed"], told["best"]) == (["lr1e+30-seed1"], "lr0.003-seed1")
    assert told["runs"]["lr1e+30-seed1"]["settings"]["learning_rate"] == 1e30
    assert "take a smaller learning rate" in told["runs"]["lr1e+30-seed1"]["failed"]
    assert "lr1e+30-seed1  failed: " in said
    assert not list(toy.folder.rglob("checkpoints"))
    assert "no step" not in assert_well(fine_tune(command))  # it is not tried again


def test_where_all_runs_fail_the_command_does(toy: Toy) -> None:
    """Here nothing but the scores tells of it: the loss of the only logged step was computed before its update."""
    command = toy.command("grid", "--learning_rate", "1e30", "--epochs", "0.2")
    errors = assert_ended(launch(command), 2, "error: toy: no run has a score")
    assert str(toy.folder / "grid" / "results.json") in errors
    assert "is no number" in results(toy.folder / "grid")["runs"]["lr1e+30-seed1"]["failed"]
    assert not (toy.folder / "grid" / "toy" / "model").exists()


# Scores without training


def test_a_split_that_came_later_is_named_and_the_model_answers_it(tmp_path: Path, tune: Tune) -> None:
    """A fine-tuned model scores as it did, without the data that it was trained on."""
    toy = tuning.write_toy(tmp_path / "toy")
    out, later = (toy.folder / name / "toy" for name in ("out", "later"))
    command = toy.command("out", "--epochs", 0.4)
    (toy.data / "toy.toml").write_text(tuning.TASK.replace('test = "test.tsv"\n', ""))
    assert "not answered" not in tune(command)
    left = out / "lr0.003-seed1" / "checkpoints" / "step-1"
    left.mkdir(parents=True)  # as after a kill
    (toy.data / "toy.toml").write_text(tuning.TASK)
    told = "toy: test is new or has changed since the best run, which has not answered it: give --evaluate --model"
    assert told in tune(command)
    assert not left.parent.exists()
    again = toy.command("again", "--epochs", 0.2)
    assert "not answered" not in tune(again)
    with (toy.data / "test.tsv").open("a") as file:
        file.write("good film\n")
    assert told in tune(again)
    (toy.data / "train.tsv").unlink()  # which only training needs
    tune(toy.command("later", "--evaluate", "--model", out / "model"))
    found = results(later.parent)
    assert ([*found["runs"]], found["scores"]) == (["scored"], results(out.parent)["scores"])
    said = [folder / "predictions" / "predictions_dev.tsv" for folder in (out, later)]
    assert said[0].read_bytes() == said[1].read_bytes()
    assert (later / "predictions" / "predictions_test.tsv").exists()
    assert not (later / "model").exists()


def test_what_has_learned_nothing_is_not_scored(toy: Toy, tune: Tune) -> None:
    for more, message in (("--check", "not fine-tuned for a task"), ("--from-scratch", "trains nothing")):
        assert message in tune(toy.command("out", "--evaluate", more), code=2)
    for flag in ("--seeds", "--batch", "--epochs"):
        assert f"leave out {flag}" in tune(toy.command("out", "--evaluate", flag, 2), code=2)
    assert not (toy.folder / "out").exists()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_on_a_gpu_scores_as_on_a_cpu(toy: Toy, dtype: str) -> None:
    if dtype == "bf16" and not torch.cuda.is_bf16_supported():
        pytest.skip("no bf16 here")
    plain = ["--dropout.hidden", "0", "--dropout.attention", "0"]
    scores = {}
    for device, numbers in (("cpu", "fp32"), ("cuda", dtype)):
        command = toy.command(device, "--parallel.device", device, "--precision.dtype", numbers, *plain)
        # a process of its own: those that are forked keep the accelerator that DeepSpeed has chosen for the tests
        train = [sys.executable, str(ROOT / "finetuning" / "run_task.py"), *command]
        done = subprocess.run(train, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        told = results(toy.folder / device)
        assert told["runs"][told["best"]]["device"] == device
        scores[device] = told["score"]
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=0.1)
    texts = ["a good film", "an awful plot", ""]
    both = [load(toy.folder / "cuda" / "toy", "fp32", device)(texts) for device in ("cpu", "cuda")]
    for one, other in zip(*both, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-3)
