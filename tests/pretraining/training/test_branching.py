"""Where a branch begins: what it takes of the other run, and what is left where it cannot."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.commands import assert_refusal
from support.training import Place

from pretraining.checkpoint.reading import find_fault
from pretraining.checkpoint.record import FOLDER, list_finished
from pretraining.checkpoint.state import RunState, Saved
from pretraining.config.overrides import load_recipe
from pretraining.huggingface.model_card import BranchSummary
from pretraining.training.branching import copy_log, link_file, list_skips_done, reopen_phase, take_checkpoint
from pretraining.training.request import Branch
from pretraining.training.skips import Skip


def test_a_branch_is_named_by_a_folder_and_a_step(tmp_path: Path) -> None:
    """A folder whose name has an @ is taken for itself where it is there."""
    at, run = tmp_path / "run@7", tmp_path / "run"
    assert [Branch.parse(str(path)).step for path in (at, run, f"{run}@x")] == [7, None, None]
    assert (Branch.parse(str(at)).place, Branch.parse(f"{run}@x").place) == (run, tmp_path / "run@x")
    at.mkdir()
    assert [(found.place, found.step) for found in map(Branch.parse, (str(at), f"{at}@9"))] == [(at, None), (at, 9)]
    assert Branch.parse(str(at)).name == "run@7"


def test_a_phase_that_got_more_steps_is_opened_again(place: Place) -> None:
    """At its end, and only where it has more."""
    recipe = load_recipe(place.recipe)
    more, fewer, both = (
        load_recipe(place.recipe, [f"--phases.{one}"]) for one in ("1.steps=5", "1.steps=2", "0.steps=9")
    )
    done, between, within = RunState(phase=2, step=8), RunState(phase=1, step=5), RunState(phase=1, phase_step=1)
    assert reopen_phase(done, recipe, more) == replace(done, phase=1, phase_step=3)
    assert reopen_phase(between, recipe, both) == replace(between, phase=0, phase_step=5)
    same = [(done, recipe), (done, fewer), (done, both), (between, more), (within, both), (RunState(), both)]
    for state, now in same:
        assert reopen_phase(state, recipe, now) is state


def test_batches_that_were_left_out_later_may_be_good_ones() -> None:
    """Those that were left out earlier count into the place in the order."""
    places = [(0, 3, 2), (1, 2, 1), (1, 4, 3), (1, 9, 1), (2, 0, 1)]
    early, next_to_it, last, later, other = (Skip(*place, "") for place in places)
    skips = [other, later, last, next_to_it, early]
    wanted = {(1, 4): [early, next_to_it, last], (1, 3): [early, next_to_it], (1, 2): [early], (0, 3): []}
    for (phase, step), done in wanted.items():
        assert [*list_skips_done(skips, RunState(phase=phase, phase_step=step))] == done


def test_the_log_is_taken_without_a_torn_line(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events.out.1").write_bytes(b"events")
    (run / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    for _ in range(2):  # after a kill the same command takes it again
        copy_log(run, out, BranchSummary("run", 1))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind": "step", "step": 1}'
    note = json.loads(lines[1])
    assert (note["kind"], note["step"], note["text"]) == ("note", 1, "branch of run after step 1")
    assert (out / "events.out.1").read_bytes() == b"events"
    copy_log(tmp_path / "nothing", out, BranchSummary("nothing", 1))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1


def fail_with(number: int) -> Mock:
    return Mock(side_effect=OSError(number, os.strerror(number)))


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_is_taken_whole(
    place: Place, straight: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As second names, or as copies on another disk; what a killed start has left is thrown away."""
    if not links:
        monkeypatch.setattr(os, "link", fail_with(errno.EXDEV))
    saved = Saved.read(list_finished(straight)[2])
    folder = place.folder / "new" / FOLDER / saved.folder.name
    left = folder.with_name(folder.name + ".tmp")
    left.mkdir(parents=True)
    (left / saved.record.files[0].path).write_text("half")
    taken = replace(saved, run=replace(saved.run, branch=BranchSummary("other", saved.record.step)))
    take_checkpoint(taken, folder)
    assert find_fault(folder) is None
    assert Saved.read(folder).run == taken.run
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    for file in saved.record.files:
        assert os.path.samefile(saved.folder / file.path, folder / file.path) == links
    assert (find_fault(saved.folder), Saved.read(saved.folder).run) == (None, saved.run), "the other run is as it was"


def test_a_full_disk_leaves_no_half_of_a_checkpoint(
    place: Place, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", fail_with(errno.EXDEV))
    monkeypatch.setattr(shutil, "copyfileobj", fail_with(errno.ENOSPC))
    saved = Saved.read(list_finished(straight)[2])
    folder = place.folder / "new" / FOLDER / saved.folder.name
    assert_refusal("No space left on device\nmake room, or keep fewer checkpoints", take_checkpoint, saved, folder)
    assert not [*folder.parent.iterdir()]
    copy = place.folder / "copy"
    assert_refusal("cannot be written: No space left on device", link_file, straight / "recipe.toml", copy)
