"""Runs that are stopped and go on end where the straight run ends: bit for bit, and on other ranks to rounding."""

from functools import partial
from pathlib import Path

import pytest
from support.faults import stop_at
from support.marks import slow
from support.training import CUT, Place, assert_ended, assert_same, assert_same_curve, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretraining.checkpoint.reading import load_checkpoint
from pretraining.processes.ending import Code

LAMB = ["--optimizer.name", "lamb"]
EVERY = ["--logging.every", "2", "--evaluation.every", "3", "--checkpoints.keep", "9"]
"""stops fall between the lines of the log"""
STOPS = (3, 5, 7)
"""between two lines, at the end of a phase, in the second phase, where the daily test does not stop"""
WAYS = {
    f"{dtype} ZeRO {zero} {name}": ["--precision.dtype", dtype, "--parallel.zero", str(zero), *more, *CUT * (zero == 3)]
    for dtype, stages in (("fp32", range(4)), ("bf16", range(1, 4)))  # in bf16 ZeRO 0 is ZeRO 1
    for zero in stages
    for name, more in (("adamw", []), ("lamb", LAMB))
}
CASES = [("fp32 ZeRO 1 adamw", 2, STOPS[:2]), *(slow(way, 2 + ("lamb" in way), STOPS) for way in WAYS)]
MOVES: list[tuple[int, int, list[str]]] = [
    (1, 2, ["--parallel.zero", "0"]),
    (2, 4, ["--parallel.zero", "3", *CUT, "--phases.0.micro-batch", "12"]),
    (3, 6, ["--parallel.zero", "2", "--phases.0.micro-batch", "2", "--phases.1.micro-batch", "4"]),
]
"""ranks, the step after which they stop, and how they share the work until then"""


def train_until(step: int, place: Place, *words: str, ranks: int = 2) -> str:
    """Trains until the run stops after a step. Returns what is printed."""
    run = place.launch(*words, ranks=ranks, fault=partial(stop_at, step))
    assert_ended(run, Code.STOPPED, f"after step {step}, and saved")
    return run.done()[0].output


@pytest.mark.parametrize(("way", "ranks", "stops"), CASES)
def test_a_stopped_run_is_the_straight_one_bit_for_bit(
    place: Place, way: str, ranks: int, stops: tuple[int, ...]
) -> None:
    place.train("straight", *EVERY, *WAYS[way], ranks=ranks)
    stopped = ["stopped", *EVERY, *WAYS[way]]
    for step in stops:
        train_until(step, place, *stopped, ranks=ranks)
    place.train(*stopped, ranks=ranks)
    assert_same(place.folder / "stopped", place.folder / "straight")


def assert_same_end(run: Path, straight: Path) -> None:
    """The curve to 1e-5, and the weights."""
    assert_same_curve(run, straight, 1e-5)
    weights, wanted = (load_checkpoint(folder)[1] for folder in (run, straight))
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [pytest.param([], id="adamw"), pytest.param(LAMB, id="lamb")])
def test_other_ranks_go_on_with_the_same_curve(place: Place, optimizer: list[str]) -> None:
    """A run may change its ranks, its ZeRO stage and its micro-batches on the way."""
    place.train("straight", *optimizer, ranks=1)
    moved = ["moved", "--logging.tensorboard", "true", *optimizer]
    outputs = [train_until(step, place, *moved, *how, ranks=ranks) for ranks, step, how in MOVES]
    place.train(*moved, "--parallel.zero", "1", "--phases.1.micro-batch", "12", ranks=1)
    assert "changed since then: ranks 2 -> 3" in outputs[2]
    assert "changed since then: phases.0.micro_batch 12 -> 2" in outputs[2]
    assert_same_end(place.folder / "moved", place.folder / "straight")
    seen = EventAccumulator(str(place.folder / "moved"), size_guidance={"scalars": 0})
    seen.Reload()
    assert [event.step for event in seen.Scalars("train/loss")] == list(range(1, 9))


@pytest.mark.slow
def test_copied_positions_are_the_same_on_any_ranks(place: Place) -> None:
    """The second phase begins with them, also where ranks have parts of them and the run stopped between the phases."""
    copied = ["--phases.1.new_positions", "copied"]
    parts = [*copied, "--parallel.zero", "3", *CUT]
    place.train("drawn", ranks=1)
    place.train("copied", *copied, "--parallel.zero", "0", ranks=1)
    for more in (["--stop-after", "short"], []):
        place.train("stopped", *parts, *more)
    assert_same_end(place.folder / "stopped", place.folder / "copied")
    ours, theirs = (records(place.folder / name)[5]["masked_loss"] for name in ("copied", "drawn"))
    assert ours != pytest.approx(theirs, rel=1e-6), "the positions are as they were"
