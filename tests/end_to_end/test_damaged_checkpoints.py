"""Checkpoints that are damaged: a run goes on from the one before, and leaves them as they are."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.damage import FILES, flip, spoil_weight, truncate
from support.marks import slow
from support.training import SAVES, Place, assert_ended, assert_same, contents, stopped_at

from pretraining.checkpoint.record import DAMAGED, FOLDER, RECORD, list_finished


@pytest.mark.parametrize(
    ("file", "damage"), [(FILES[0], flip), slow(RECORD, flip), slow(FILES[2], truncate), slow(RECORD, Path.unlink)]
)
def test_a_run_goes_on_from_the_checkpoint_before(
    place: Place, straight: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """What was damaged gives up its place when its step is saved again, and is kept beside it."""
    run = stopped_at(straight, place.folder / "run", 6)
    newest = list_finished(run)[-1]
    damage(newest / file)
    there = contents(newest)
    assert_ended(place.launch("run", *SAVES), 0, f"warning: {newest / file}: ", f"{newest} is left as it is")
    assert_same(run, straight)
    kept = contents(newest.with_name(newest.name + ".damaged"))
    assert kept.pop(DAMAGED)
    assert kept == there
    assert newest in list_finished(run)


def test_a_run_with_damaged_checkpoints_alone_does_not_begin_anew(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 2)
    first, second = list_finished(run)
    flip(first / FILES[0])
    (second / RECORD).unlink()
    there = [contents(folder) for folder in (first, second)]
    for time_of in ("first", "second"):
        errors = assert_ended(place.launch("run", *SAVES), 2, "error: ", "every checkpoint is damaged: step-")
        assert (str(first / FILES[0]) in errors) == (time_of == "first")
    for folder, before in zip((first, second), there, strict=True):
        after = contents(folder)
        assert after.pop(DAMAGED)
        assert after == before
    assert len(list((run / FOLDER).iterdir())) == 2


def test_a_weight_that_is_no_number_is_named_before_any_work(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 2)
    newest = list_finished(run)[-1]
    message = f"error: {newest}: {spoil_weight(newest, math.nan)} has values that are no numbers"
    assert_ended(place.launch("run", *SAVES), 2, message)
    assert_ended(place.launch("other", "--init", run), 2, message)


def test_what_is_kept_and_what_goes(place: Place, straight: Path) -> None:
    """The newest, those of some steps, and nothing that a killed run has left half done."""
    run = stopped_at(straight, place.folder / "run", 6)
    for name in ("step-00000007.tmp", "step-00000006.old"):
        (run / FOLDER / name).mkdir()
        (run / FOLDER / name / RECORD).touch()
    words = ["--checkpoints.keep", 1, "--checkpoints.keep-at", "[2, 3, 6, 7]"]
    assert_ended(place.launch("run", *words), 0)
    names = sorted(path.name for path in (run / FOLDER).iterdir())
    assert names == [f"step-0000000{step}" for step in (2, 3, 6, 7, 8)], "7 is saved for its own sake"
    assert_same(run, straight)
