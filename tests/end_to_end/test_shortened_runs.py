"""The same recipe in less time, on shards of other lengths, and what a run says when its steps change on the way."""

import re
from functools import partial
from pathlib import Path

import pytest
from support.commands import run_main
from support.faults import stop_at
from support.training import Place, assert_ended, assert_refused, assert_same, records

from pretraining import train as entry
from pretraining.processes.ending import Code

HALF = ["--shorten", "0.5"]
MADE = "all phases shortened to 50%: phases.0.steps 5 -> 2, phases.1.steps 3 -> 2\n"
SMALL = ["steps=1", "batch=2", "micro_batch=1"]


@pytest.mark.usefixtures("leaves_group")
def test_a_shortened_run_goes_on_with_the_same_flag(place: Place) -> None:
    """It is the run with these steps, bit for bit, and is never shortened twice."""
    assert MADE in run_main(entry.main, *place.command("short", *HALF, "--check"))
    assert MADE in place.train("short", *HALF, "--stop-after", "short", ranks=1)
    place.train("short", *HALF, ranks=1)
    place.train("steps", "--phases.0.steps", "2", "--phases.1.steps", "2", ranks=1)
    run, other = place.folder / "short", place.folder / "steps"
    assert_same(run, other)
    assert (run / "recipe.toml").read_text() == (other / "recipe.toml").read_text()
    twice = place.command("short", "--phases.0.steps", "4", "--phases.1.steps", "4")
    assert_refused(twice, "all phases were shorter: is --shorten 0.5 missing?")
    own = ["--recipe", str(run / "recipe.toml"), "--data", str(place.data), "--out", str(run)]
    assert_refused([*own, *HALF], "has the steps of this run already; leave --shorten out")
    assert "trained already" in run_main(entry.main, *own)


@pytest.mark.usefixtures("leaves_group")
@pytest.mark.parametrize("share", ["0", "-0.5", "1.01", "nan", "inf"])
def test_no_other_shares(place: Place, share: str) -> None:
    told = run_main(entry.main, *place.command("run", f"--shorten={share}", "--check"), code=2)
    assert re.fullmatch(r"error: --shorten \S+: give a share above 0 and up to 1, such as 0.05\n", told)
    assert_refused(place.command("run", f"--shorten={share}", "--seed", "x"), "--shorten", "--seed")


def test_a_jump_of_the_learning_rate_is_told(place: Place, straight: Path) -> None:
    """With what the next step would have had, and what it has."""
    said = [stop_and_go_on(place, name, *more) for name, *more in (("same",), ("other", "--phases.0.steps", "20"))]
    assert "jumps" not in said[0]
    then, now = (records(run)[4]["learning_rate"] for run in (straight, place.folder / "other"))
    assert f"the learning rate jumps at step 4: {then:.1e} -> {now:.1e}\n" in said[1]


def stop_and_go_on(place: Place, name: str, *more: str) -> str:
    """Stops a run in its first phase, and goes on to the end of it; returns what is printed then."""
    words = [name, "--stop-after", "short"]
    assert_ended(place.launch(*words, ranks=1, fault=partial(stop_at, 4)), Code.STOPPED)
    return place.train(*words, *more, ranks=1)


@pytest.mark.parametrize("recipe", ["bert_mini", "adapt"])
def test_recipes_train_on_shards_of_other_lengths_by_the_flags_that_are_offered(
    recipe: str, place: Place, straight: Path
) -> None:
    base = ["--init", str(straight)] if recipe == "adapt" else []
    small = [f"--phases.{number}.{word}" for number in range(3 - len(base) // 2) for word in SMALL]
    shown = Place(place.data, Path(recipe), place.folder)
    told = assert_refused(shown.command(recipe, *base, *small), "the data has 32, 64; make it with")
    [flags] = re.findall(r", or add (.*)", told)
    assert "sequences of length 64" in shown.train(recipe, *base, *small, *flags.split(), ranks=1)
