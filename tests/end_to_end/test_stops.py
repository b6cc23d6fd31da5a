"""Runs that are stopped and go on end where the straight run ends: bit for bit, and elsewhere to rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from support.processes import ROOT
from support.training import STOP, Place, measured, records, state, train_all
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretraining.checkpoint.reading import finished, read_record, read_weights
from pretraining.model.shape import Shape
from pretraining.training.trainer import repeated

CUT = ["--deepspeed.zero_optimization.stage3_param_persistence_threshold", "0"]
LAMB = ["--optimizer.name", "lamb", "--optimizer.trust_all", "true"]
EVERY = ["--logging.every", "2", "--evaluation.every", "3", "--checkpoints.keep", "9"]
"""stops fall between the lines of the log"""
STOPS = (3, 5, 7)
"""between two lines, at the end of a phase, in the second phase"""
WAYS = {
    f"{dtype} ZeRO {zero} {name}": ["--precision.dtype", dtype, "--parallel.zero", str(zero), *more, *CUT * (zero == 3)]
    for dtype in ("fp32", "bf16")
    for zero in range(4)
    for name, more in (("adamw", []), ("lamb", LAMB))
}
MOVES: list[tuple[int, list[object]]] = [
    (1, ["--parallel.zero", "0", STOP, 2]),
    (2, ["--parallel.zero", "3", *CUT, "--phases.0.micro-batch", "12", STOP, 4]),
    (3, ["--parallel.zero", "2", "--phases.0.micro-batch", "2", "--phases.1.micro-batch", "4", STOP, 6]),
    (1, ["--parallel.zero", "1", "--phases.1.micro-batch", "12"]),
]
"""ranks, and how they share the work, until the run stops"""


def run_straight_and_stopped(place: Place, ranks: int, ways: dict[str, list[str]]) -> Place:
    """Each way in two folders."""
    commands: list[list[object]] = []
    for name, more in ways.items():
        commands.append(place.command(f"{ranks} {name} straight", *EVERY, *more))
        for stop in (*STOPS, 99):
            commands.append(place.command(f"{ranks} {name} stopped", *EVERY, *more, STOP, stop))
    for (code, _, errors), command in zip(train_all(ranks, commands, timeout=400), commands, strict=True):
        assert code == (75 if command[-1] in STOPS else 0), errors
    return place


@pytest.fixture(scope="module")
def two_ranks(shared: Place) -> Place:
    return run_straight_and_stopped(shared, 2, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_is_the_straight_one_bit_for_bit(two_ranks: Place, way: str) -> None:
    straight, stopped = (two_ranks.folder / f"2 {way} {how}" for how in ("straight", "stopped"))
    ours, theirs = state(stopped), state(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert measured(stopped) == measured(straight)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_so_on_other_numbers_of_ranks(place: Place, ranks: int) -> None:
    run_straight_and_stopped(place, ranks, WAYS)
    for way in WAYS:
        test_a_stopped_run_is_the_straight_one_bit_for_bit(place, way)


@pytest.fixture(scope="module")
def moved(shared: Place) -> Place:
    """Runs that change their ranks, their ZeRO stage and their micro-batches on the way."""
    for name, more in (("adamw", []), ("lamb", LAMB)):
        assert train_all(1, [shared.command(f"{name} straight", *more)])[0][0] == 0
        for number, (ranks, how) in enumerate(MOVES):
            [(code, output, errors)] = train_all(ranks, [shared.command(f"{name} moved", *more, *how)])
            assert code == (0 if number == len(MOVES) - 1 else 75), errors
            if number == 2:
                assert "changed since then: ranks 2 -> 3" in output
                assert "changed since then: phases.0.micro_batch 12 -> 2" in output
    return shared


def assert_same_end(run: Path, straight: Path) -> None:
    """The curve to 1e-5, and the weights."""
    ours, theirs = records(run), records(straight)
    assert [each["step"] for each in ours] == [each["step"] for each in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "masked", "next", "gradient_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), f"{name} at step {a['step']}"
    shape = Shape(**read_record(finished(run)[-1])["shape"])
    weights, wanted = (read_weights(finished(each)[-1], shape) for each in (run, straight))
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_other_ranks_go_on_with_the_same_curve(moved: Place, optimizer: str) -> None:
    assert_same_end(moved.folder / f"{optimizer} moved", moved.folder / f"{optimizer} straight")


def test_nvidias_recipe_cut_down(place: Place) -> None:
    """Two ranks, stopped, one rank, stopped, two ranks: it ends where the straight run ends."""
    sizes = "--model.size tiny --model.positions 64 --precision.dtype fp32 --logging.tensorboard false"
    first = "--phases.0.length 32 --phases.0.batch 24 --phases.0.micro_batch 4 --phases.0.steps 6"
    second = "--phases.1.length 64 --phases.1.batch 12 --phases.1.micro_batch 2 --phases.1.steps 4"
    large = dataclasses.replace(place, recipe=ROOT / "pretraining/recipes/bert_large_lamb.toml")
    words = [*sizes.split(), *first.split(), *second.split(), "--logging.peak_flops", "1e12"]
    straight, stopped = (large.command(name, *words) for name in ("straight", "stopped"))
    assert [code for code, _, _ in train_all(2, [straight, [*stopped, STOP, 4]])] == [0, 75]
    assert [code for code, _, _ in train_all(1, [[*stopped, STOP, 7]])] == [75]
    assert [code for code, _, _ in train_all(2, [stopped])] == [0]
    assert_same_end(place.folder / "stopped", place.folder / "straight")


def test_tensorboard_has_each_step_once_and_trust_ratios(place: Place) -> None:
    arguments = ["--logging.tensorboard", "true", *LAMB]
    commands = [place.command("run", *arguments, *stop) for stop in ([STOP, 3], [STOP, 6], [])]
    assert [code for code, _, _ in train_all(1, commands)] == [75, 75, 0]
    seen = EventAccumulator(str(place.folder / "run" / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    seen.Reload()
    assert [each.step for each in seen.Scalars("train/loss")] == list(range(1, 9))
    histograms = {tag: seen.Histograms(tag) for tag in seen.Tags()["histograms"]}
    parts = {"layers.0", "layers.1", "embeddings", "masked_head", "next_head", "pooler"}
    assert histograms.keys() == {f"trust_ratio/{part}" for part in parts}
    for each in histograms.values():
        assert [one.step for one in each] == list(range(1, 9))
    assert (
        histograms["trust_ratio/layers.0"][0].histogram_value.num == 16
    )  # as many parameters as the paper's layer has


def test_copied_positions_repeat_those_that_are_known() -> None:
    rows = repeated(torch.arange(12.0).view(12, 1), known=4)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_copied_positions_are_the_same_under_every_stage(place: Place) -> None:
    """The second phase begins with them, on all ranks and in a run that stopped between the phases."""
    copied = ["--phases.1.new_positions", "copied"]
    alone = [place.command("drawn"), place.command("copied", *copied, "--parallel.zero", "0")]
    assert [code for code, _, _ in train_all(1, alone)] == [0, 0]
    ways = {"ZeRO 1": "1", "ZeRO 2": "2", "ZeRO 3": "3"}
    two = [place.command(name, *copied, "--parallel.zero", zero, *CUT * (zero == "3")) for name, zero in ways.items()]
    stopped = place.command("stopped", *copied, "--parallel.zero", "3", *CUT)
    codes = [code for code, _, _ in train_all(2, [*two, [*stopped, "--stop-after", "short"], stopped])]
    assert codes == [0] * 5
    for name in (*ways, "stopped"):
        assert_same_end(place.folder / name, place.folder / "copied")
    ours, theirs = (records(place.folder / name)[5]["masked"] for name in ("copied", "drawn"))
    assert ours != pytest.approx(theirs, rel=1e-6), "the positions are as they were"
