"""Branches: a new run that goes on from a checkpoint of another one, by the real command, and what they refuse."""

import dataclasses
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.damage import FILES, flip
from support.faults import BAD, Poison, kill_at
from support.marks import slow
from support.training import (
    CUT,
    SAVES,
    Place,
    assert_ended,
    assert_refused,
    assert_same,
    assert_same_curve,
    everything,
    records,
    state,
    stopped_at,
    train_straight,
)

from data_prep.common.codes import ENDED
from data_prep.common.locks import LOCK
from pretraining.checkpoint.record import FOLDER, list_finished
from pretraining.processes.ending import Code
from pretraining.training.skips import read_skips

STABLE = [*SAVES, "--phases.0.decay", "constant", "--phases.0.warmup_steps", "2"]
"""a run whose learning rate stays at its highest"""
HOLD = "import fcntl, sys\nfile = open(sys.argv[1], 'a')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint()\ninput()"


@pytest.mark.parametrize("step", [3, slow(5)])
def test_a_branch_with_the_same_recipe_is_the_uninterrupted_run(place: Place, straight: Path, step: int) -> None:
    """Within a phase and between two: tensors and records bit for bit. The other run is only read."""
    before = everything(straight)
    said = place.train("new", *SAVES, "--branch", f"{straight}@{step}")
    new, began = place.folder / "new", f"{straight.name} after step {step}"
    assert f"\ngoes on as a branch of {began}\n" in said
    assert "changed since then" not in said
    assert everything(straight) == before
    assert_same(new, straight)
    assert [record["step"] for record in records(new)] == list(range(1, 9))
    assert [note["text"] for note in records(new, "note")] == [f"branch of {began}"]
    assert f"Its run is a branch of {began}." in (new / "export" / "README.md").read_text()


@pytest.mark.slow
def test_a_stable_run_decays_in_a_branch_and_a_finished_one_is_lengthened(place: Place) -> None:
    """Warm-up, stable, decay: the branch that decays is the run that was to decay from its first step on, and the one
    with more steps in its last phase is the run that had them from its first step on."""
    stable = train_straight(place, "stable", *STABLE)
    decays = [*STABLE, "--phases.0.decay", "wsd", "--phases.0.decay_steps", "2"]
    said = place.train("decayed", *decays, "--branch", f"{stable}@6")
    for change in ("decay constant -> wsd", "decay_steps not set -> 2"):
        assert f"changed since then: phases.0.{change} (that phase is done)\n" in said
    decayed = place.folder / "decayed"
    assert_same(decayed, train_straight(place, "decays", *decays))
    rates = [record["learning_rate"] for record in records(decayed)]
    assert rates == pytest.approx([1e-3, *[2e-3] * 6, 1e-3])
    longer = [*STABLE, "--phases.1.steps", "5"]
    for source in (stable, f"{stable}@8", stable / FOLDER / "step-00000008"):
        shutil.rmtree(place.folder / "lengthened", ignore_errors=True)
        said = place.train("lengthened", *longer, "--branch", source)
        assert "phase long (2 of 2): 5 steps, 3 of them done" in said
    ours, theirs = place.folder / "lengthened", train_straight(place, "longer", *longer)
    assert all(torch.equal(value, state(theirs)[name]) for name, value in state(ours).items())
    assert_same_curve(ours, theirs, 0)


@pytest.mark.slow
def test_phases_that_are_not_begun_may_be_others(place: Place, straight: Path) -> None:
    """Also where the phase that the checkpoint lies in ends at once; a phase of its own begins at its own rate."""
    text, recipe = place.recipe.read_text(), place.folder / "other.toml"
    phase = '[[phases]]\nname = "decay"\nlength = 32\nbatch = 24\nmicro_batch = 4\nsteps = 2\nlearning_rate = 2e-3\n'
    recipe.write_text(text[: text.index('[[phases]]\nname = "long"')] + phase + text[text.index("[evaluation]") :])
    other = dataclasses.replace(place, recipe=recipe)
    for step, words in ((3, ["--phases.0.steps", "3"]), (5, [])):
        said = other.train(f"new {step}", *SAVES, *words, "--branch", f"{straight}@{step}")
        assert "changed since then: phases.1 long -> decay\n" in said
        new = records(place.folder / f"new {step}")[step:]
        steps = [(record["step"], record["learning_rate"], record["phase"]) for record in new]
        assert steps == [(step + 1, 2e-3, 2), (step + 2, 1e-3, 2)]
    done = other.command("done", *SAVES, "--branch", f"{straight}@8")
    assert_refused(done, "cannot go on with this recipe\n  the phases was short, long, now short, decay")


@pytest.mark.slow
def test_a_branch_takes_any_ranks_and_any_stage(place: Place, straight: Path) -> None:
    """What two ranks wrote one rank goes on with, and stops, and two go on with that in the same folder."""
    base = shutil.copytree(straight, place.folder / "base")  # other tests read the one that they share
    words = [*SAVES, "--parallel.zero", "3", *CUT, "--branch", f"{base}@3"]
    assert "changed since then: ranks 2 -> 1\n" in place.train("new", *words, "--stop-after", "short", ranks=1)
    shutil.rmtree(base)  # what was taken is all that is needed
    assert "continues after step 5\n" in place.train("new", *words)
    assert_same_curve(place.folder / "new", straight, 1e-5)


@pytest.mark.slow
def test_a_branch_that_is_killed_is_the_one_that_is_not(place: Place, straight: Path) -> None:
    """Before its first own checkpoint and after it: the same command goes on in its folder."""
    words = ["--phases.0.steps", "40", "--checkpoints.every", "8", "--branch", f"{straight}@3"]
    for step, said in ((6, "goes on as a branch"), (18, "goes on as a branch"), (21, "continues after step ")):
        killed = place.launch("killed", *words, fault=partial(kill_at, step)).wait()
        assert {rank.code for rank in killed} <= {-signal.SIGKILL, Code.RANK_LOST}  # which one sees before its own end
        assert said in killed[0].output
    place.train("killed", *words)
    assert_same(place.folder / "killed", train_straight(place, "not killed", *words))


@pytest.mark.slow
def test_a_branch_goes_back_to_where_it_began(place: Place, straight: Path) -> None:
    """If it diverges before its first checkpoint; it leaves out what was left out before its step, and no more."""
    new, words = place.folder / "new", ["--checkpoints.every", "0", "--branch", f"{straight}@{BAD - 1}"]
    run = place.launch(new, *words, fault=Poison("loss", "batch"))
    assert_ended(run, 0, "the run goes back to its last checkpoint")
    [skip] = read_skips(new)
    assert (skip.phase, skip.first, skip.count) == (0, BAD, 1)
    assert [record["step"] for record in records(new)] == list(range(1, 9))
    for step, skips in ((BAD - 1, []), (5, [skip])):
        name = f"again {step}"
        place.train(name, "--stop-after", "short", "--branch", f"{new}@{step}", ranks=1)
        assert read_skips(place.folder / name) == skips


def test_branches_that_cannot_be_are_refused(place: Place, straight: Path) -> None:
    """Before anything is written into the new folder or the old one."""
    run = stopped_at(straight, place.folder / "run", 6)
    shutil.rmtree(list_finished(run)[1])
    flip(list_finished(run)[-1] / FILES[0])
    before, missing = everything(run), f"{run}: no checkpoint step-00000002; there are step-00000001, step-00000003"

    def refuse(text: object, message: str, *more: object) -> None:
        new = place.folder / "new"
        assert_refused(place.command("new", *SAVES, "--branch", text, *more), message)
        assert {path.name for path in new.rglob("*")} <= {LOCK, ENDED}
        assert everything(run) == before

    refuse(f"{run}@2", missing)
    refuse(f"{run}@2", missing, "--check")
    refuse(run, f"--branch {run}: {list_finished(run)[-1] / FILES[0]}: ")
    refuse(f"{run}x@2", f"{run}x: no such folder")
    refuse(place.data, f"{place.data}: has no finished checkpoint")
    refuse(run, f"--branch {run}: is the run in --out {run} itself", "--out", run)
    refuse(f"{run}@3", f"--init {run}: not with --branch", "--init", run)
    message = f"--branch {run}@3: cannot go on with this recipe\n  model.layers was 2, now 3"
    refuse(f"{run}@3", message, "--model.layers", 3)
    refuse(straight, f"--branch {straight}: has done all phases of this recipe")
    with subprocess.Popen([sys.executable, "-c", HOLD, run / LOCK], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        refuse(f"{run}@3", f"is training in {run}\nwait for its end, or name a copy of ")
        holder.communicate(b"\n")


def test_a_run_of_its_own_is_no_branch(place: Place, straight: Path) -> None:
    stopped_at(straight, place.folder / "new", 3)
    command = place.command("new", *SAVES, "--branch", f"{straight}@5")
    assert_refused(command, f"--out {place.folder / 'new'}: is no branch, not the one of --branch {straight}@5; ")
