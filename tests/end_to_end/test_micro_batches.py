"""Runs that find their micro-batches, the same on all ranks and after a stop; and what is said of those too large."""

from functools import partial
from pathlib import Path

import pytest
from support.faults import Capacity, all_of, stop_at
from support.marks import slow
from support.training import FEW, Place, assert_ended, assert_same, assert_same_curve, records, train, train_straight

from pretraining.checkpoint.record import list_finished
from pretraining.checkpoint.state import Saved
from pretraining.processes.ending import Code

AUTO = ["--phases.0.micro_batch", "auto", "--phases.1.micro_batch", "auto"]
FOUND = "micro-batch of phase {}: {} (auto)\n"


def fixed(first: int, second: int) -> list[str]:
    return ["--phases.0.micro_batch", str(first), "--phases.1.micro_batch", str(second)]


def kept(run: Path) -> dict[str, int]:
    """The micro-batches that the last checkpoint knows."""
    found = Saved.read(list_finished(run)[-1]).run.micro_batches
    return {name: each.sequences for name, each in found.items()}


def stop_short(place: Place) -> None:
    """A run of two ranks with room for 9 and 5 sequences, which stops after step 3."""
    going = place.launch("run", *AUTO, fault=partial(all_of, Capacity((9, 5)), partial(stop_at, 3)))
    assert_ended(going, Code.STOPPED)


@pytest.fixture(scope="module")
def told(shared: Place) -> Path:
    """A run that is told the micro-batches which ranks find that have room for 9 and 5 sequences."""
    return train_straight(shared, "told", *fixed(4, 3))


def test_a_cpu_takes_all_that_its_share_has(place: Place, straight: Path) -> None:
    """Where memory is plenty, nothing is accumulated; the curve is that of any micro-batch."""
    output = place.train("run", *AUTO)
    run = place.folder / "run"
    for name, size in (("short", 12), ("long", 6)):
        assert f"micro-batch of phase {name}: {size} (auto)\n" in output
    assert "a step: 24 sequences of length 32, 1 x 12 a rank" in output
    assert kept(run) == {"short": 12, "long": 6}
    assert_same_curve(run, straight, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["1", "2"])
def test_the_rank_with_the_least_memory_decides(place: Place, told: Path, zero: str) -> None:
    """Trials change nothing: bit for bit, the run is the one that was told what they find."""
    how = ["--parallel.zero", zero]
    output = place.train("run", *AUTO, *how, fault=Capacity((9, 5)))
    assert FOUND.format("short", 4) + FOUND.format("long", 3) in output
    wanted = told if zero == "1" else train_straight(place, "told", *fixed(4, 3), *how)
    assert_same(place.folder / "run", wanted)


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_had(place: Place, told: Path) -> None:
    """The same ranks take the same micro-batch, though they have more memory by now; other ranks look anew."""
    stop_short(place)
    again = place.launch("run", *AUTO, fault=partial(all_of, Capacity((20, 20)), partial(stop_at, 7)))
    assert_ended(again, Code.STOPPED)
    output = FOUND.format("short", 4) + FOUND.format("long", 3)
    assert output in again.done()[0].output
    assert kept(place.folder / "run") == {"short": 4, "long": 3}
    alone = place.train("run", *AUTO, ranks=1, fault=Capacity((20,)))
    assert FOUND.format("long", 12) in alone
    assert "phase short" not in alone, "it is over"
    assert [record["step"] for record in records(place.folder / "run")] == list(range(1, 9))
    assert_same_curve(place.folder / "run", told, 1e-5)


CURE = "take a higher parallel.zero, compute.checkpoint_activations = true, or more ranks"
OTHERS = "or see what else takes memory there"


@pytest.mark.parametrize(
    ("words", "room", "phase", "why", "cure"),
    [
        (fixed(6, 2), (20, 5), 0, "6: 6 x 32 pieces do not fit into the ", f"; give 4, {OTHERS}"),
        slow(fixed(4, 6), (20, 4), 1, "6: 6 x 64 pieces do not fit into the ", f"; give 3, {OTHERS}"),
        (AUTO, (20, 0), 0, '"auto": 1 x 32 pieces do not fit into the ', f"; {CURE}"),
        slow(fixed(2, 2), (20, 0), 0, "2: 2 x 32 pieces do not fit into the ", f"; {CURE}"),
    ],
)
def test_a_micro_batch_that_does_not_fit_says_what_does(
    place: Place, words: list[str], room: tuple[int, int], phase: int, why: str, cure: str
) -> None:
    """One rank finds it; all end, and the first rank says it."""
    errors = assert_ended(place.launch("run", *words, fault=Capacity(room)), Code.CURE)
    assert errors.startswith(f"error: rank 1: phases.{phase}.micro_batch = {why}")
    assert errors.endswith(f"{cure}\n")


@pytest.mark.slow
def test_what_fitted_once_and_does_not_any_more(place: Place) -> None:
    """Another program has come to the memory while the run was stopped; what changes the memory is looked at anew."""
    stop_short(place)
    errors = assert_ended(place.launch("run", *AUTO, fault=Capacity((9, 3))), Code.CURE)
    assert 'phases.0.micro_batch = "auto": 4 x 32 pieces do not fit into the ' in errors
    assert errors.endswith(f"; give 3, {OTHERS}\n")
    output = place.train("run", *AUTO, "--precision.dtype", "bf16", fault=Capacity((9, 2)))
    assert FOUND.format("short", 2) in output


@pytest.mark.slow
def test_a_later_phase_that_will_not_fit_is_told_at_the_start(place: Place) -> None:
    """By a warning alone, as text fills less than full sequences, and not where that phase is not to come."""
    words = [*fixed(4, 6), *FEW]
    place.train("first", *words, "--stop-after", "short", fault=Capacity((4, 4)))
    [first, second] = train(place.command("both", *words), fault=Capacity((4, 20)))
    assert first.errors.startswith("warning: phases.1.micro_batch = 6: 6 x 64 pieces do not fit into the ")
    assert f"; give 3, {OTHERS}\n" in first.errors
    assert second.errors == ""
