"""The run folder: it belongs to one run at a time, and what may change between two runs in it."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import signal
import socket
from pathlib import Path

import pytest
from conftest import write_wiki
from support.base_models import swapped
from support.shards import run as shard
from support.training import (
    ENDLESS,
    SAVES,
    SEED,
    Place,
    assert_ended,
    assert_refused,
    assert_well,
    contents,
    everything,
    launch,
    records,
    stopped_at,
    train,
    train_straight,
)

from data_prep.common.capacity import num_cores
from data_prep.vocabulary.source import read_vocabulary
from pretraining import export as exporting
from pretraining.checkpoint.record import RECORD, list_finished
from pretraining.processes.ending import Code


def test_a_run_is_not_put_into_its_shards(tmp_path: Path) -> None:
    command = ["--recipe", "demo", "--data", str(tmp_path), "--out", str(tmp_path / "run")]
    assert_refused(command, f"--out {tmp_path / 'run'}: lies in --data {tmp_path}, which a run must not change")
    assert not [*tmp_path.iterdir()]


def test_a_run_is_not_put_into_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text("{}")
    command = ["--recipe", "demo", "--data", str(tmp_path / "data"), "--out", str(tmp_path)]
    assert_refused(command, f"--out {tmp_path}: is a checkpoint; name its run, or a new folder")
    assert [*tmp_path.iterdir()] == [tmp_path / RECORD]


def test_a_folder_belongs_to_one_run(place: Place) -> None:
    command, run = place.command("run", *ENDLESS), place.folder / "run"
    first = launch(command)
    first.reach(2)
    owner = f"process {first.pids[0]} on {socket.gethostname()}"
    before = first.step
    assert_ended(launch(command), 2, f"error: rank 0: --out {run}: {owner} is training in this folder")
    first.reach(before + 2)
    first.signal(signal.SIGUSR1)
    assert_ended(first, Code.STOPPED, "stopped by a signal")
    second = launch(command)
    second.reach(first.step + 1)
    second.signal(signal.SIGKILL)
    assert [rank.code for rank in second.wait()] == [-signal.SIGKILL] * 2
    third = launch(command)
    third.reach(second.step + 1)
    third.signal(signal.SIGUSR1)
    assert_ended(third, Code.STOPPED)
    assert [record["step"] for record in records(run)] == list(range(1, third.step + 1))


def test_what_may_change_is_told(place: Place, straight: Path) -> None:
    threads = max(1, num_cores() // 2)
    changes = {
        "compute.threads": ("not set", threads + 1),
        "checkpoints.every": (1, 3),
        "logging.every": (1, 2),
        "model.dropout": (0.1, 0.2),
        "optimizer.weight_decay": (0.01, 0.02),
        "parallel.zero": (1, 2),
        "phases.0.learning_rate": (0.002, 0.001),
        "phases.0.micro_batch": (4, 2),
        "precision.dtype": ("fp32", "bf16"),
    }
    run = stopped_at(straight, place.folder / "run", 3)
    words = [word for name, (_, now) in changes.items() for word in (f"--{name}", now)]
    output = assert_well(train(place.command("run", "--checkpoints.keep", "9", *words)))
    told = re.findall(r"^changed since then: (.*)", output, re.MULTILINE)
    changes |= {"threads of a rank": (threads, threads + 1)}  # which decide how sums are rounded
    assert sorted(told) == sorted(f"{name} {then} -> {now}" for name, (then, now) in changes.items())
    assert "continues after step 3\n" in output
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6, 8]


MUST_STAY = {
    "--model.layers 3": "model.layers was 2, now 3",
    "--model.hidden 64": "model.hidden was 32, now 64\n  model.intermediate was 128, now 256",
    "--optimizer.name lamb": "optimizer.name was adamw, now lamb",
    "--phases.1.name other": "the phases was short, long, now short, other",
    "--phases.0.batch 48": "phases.0.batch was 24, now 48",
    "--phases.0.length 64": "phases.0.length was 32, now 64",
    "--seed 2": f"seed was {SEED}, now 2",
}


def test_what_must_stay_is_refused_by_name(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 3)
    there = {path: contents(path) for path in list_finished(run)}
    for words, message in MUST_STAY.items():
        told = f"error: --out {run}: cannot go on with this recipe\n  {message}"
        assert_refused(place.command(run, *words.split()), told, "\ngive what was, or name a new folder\n")
    assert {path: contents(path) for path in list_finished(run)} == there


def test_a_finished_run_that_is_started_again_writes_nothing(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    before = everything(run)
    hows = ["--logging.every", "2", "--parallel.zero", "2", "--phases.0.micro_batch", "2", "--stop-after", "short"]
    for words in ([], hows[:-2], hows):
        output = assert_well(train(place.command(run, *SAVES, *words)))
        assert f"{run}: all that was asked for is trained already\n" in output
        assert "exported" not in output
        assert everything(run) == before
    shutil.rmtree(run / "export")
    assert "export: exported 37,383 parameters" in assert_well(train(place.command(run, *SAVES)))
    assert everything(run) == before


MORE = {
    "--phases.0.steps 9": "phases.0.steps was 5, now 9",
    "--phases.0.learning_rate 1e-4": "phases.0.learning_rate was 0.002, now 0.0001",
    "--seed 2": f"seed was {SEED}, now 2",
    "--optimizer.name lamb": "optimizer.name was adamw, now lamb",
    "--phases.1.steps 9": "phases.1.steps was 3, now 9",
}


@pytest.mark.slow
def test_a_finished_run_that_is_asked_for_more_names_the_command_that_does_it(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    before, new = everything(run), place.folder / "new"
    for words, change in MORE.items():
        errors = assert_refused(place.command(run, *words.split()), f"  {change}\n")
        assert errors.startswith(f"error: --out {run}: is trained to its end\n")
        assert everything(run) == before
    assert f"in more steps or phases: --branch {run} --out NEW\n" in errors
    assert f"which does all phases of its recipe: --init {run} --out NEW\n" in errors
    assert_well(train(place.command(new, *words.split(), "--branch", run), 1))
    assert [record["step"] for record in records(new)] == [*range(1, 15)], "from step 8 on"
    shutil.rmtree(new)
    command = place.command(new, *words.split(), "--init", run)
    assert "phase short (1 of 2): 5 steps" in assert_well(train(command, 1))
    assert len(records(new)) == 14


def test_a_licence_needs_no_training(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    command = place.command(run, "--card.licence", "apache-2.0")
    errors = assert_refused(command, "  card.licence was not set, now apache-2.0\n")
    export = shlex.split(errors.splitlines()[-1].partition(": ")[2])
    assert export[:2] == ["python", "pretraining/export.py"]
    assert exporting.main(export[2:]) == 0
    assert "license: apache-2.0" in (run / "export" / "README.md").read_text()


def test_a_licence_stays_where_a_later_command_names_none(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    assert_well(train(place.command(run, "--card.licence", "mit", *SAVES), 1))
    stopped_at(run, place.folder / "again", 6)
    assert_well(train(place.command("again", *SAVES), 1))
    for folder in (run, place.folder / "again"):
        assert 'licence = "mit"' in (folder / "recipe.toml").read_text()
        assert "license: mit" in (folder / "export" / "README.md").read_text()


def test_a_finished_run_with_a_phase_more_or_other_data_or_another_model(
    place: Place, straight: Path, other_data: Path
) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    longer = place.folder / "longer.toml"
    phase = '[[phases]]\nname = "third"\nlength = 64\nbatch = 12\nmicro_batch = 2\nsteps = 3\n'
    longer.write_text(place.recipe.read_text() + phase)
    another = dataclasses.replace(place, recipe=longer).command(run)
    other = dataclasses.replace(place, data=other_data).command(run, "--data.allow-other", "true")
    for command, told in ((another, "phases.2.steps was not set, now 3"), (other, "the fingerprint of the data was ")):
        errors = assert_refused(command, f"--out {run}: is trained to its end\n", f"  {told}")
        assert f": --init {run} --out NEW\n" in errors
    errors = assert_refused(place.command(run, "--model.layers", "3"), "model.layers was 2, now 3")
    assert errors.endswith("\nname a new folder\n"), "its weights do not fit"


def test_steps_that_are_added_are_trained(place: Place, straight: Path) -> None:
    """In the phase that a run is in, or in one that is to come: by the schedule of a run that always had them.

    Those of a phase that is done are refused.
    """
    more = ["--phases.0.steps", "7", "--phases.1.steps", "4"]
    straight_on = train_straight(place, "straight on", *SAVES, *more)
    run = stopped_at(straight, place.folder / "run", 3)
    fewer = place.command("run", *SAVES, "--phases.0.steps", "2")
    assert_refused(fewer, "phases.0 has 2 steps in this recipe, of which 3 are done")
    output = assert_well(train(place.command("run", *SAVES, *more)))
    for change in ("phases.0.steps 5 -> 7", "phases.1.steps 3 -> 4"):
        assert f"changed since then: {change}\n" in output
    ours, theirs = records(run), records(straight_on)
    assert [record["step"] for record in ours] == list(range(1, 12))
    assert [record["learning_rate"] for record in ours[3:]] == [record["learning_rate"] for record in theirs[3:]]
    later = stopped_at(straight, place.folder / "later", 6)
    command = place.command(later, *SAVES, "--phases.0.steps", "9")
    assert_refused(command, "  phases.0.steps (which is done) was 5, now 9\n")


@pytest.mark.slow
def test_between_phases_more_may_change(place: Place, straight: Path) -> None:
    stopped_at(straight, place.folder / "run", 5)
    changed = place.command("run", "--seed", 2, "--phases.1.batch", 24, "--phases.0.batch", 48)
    output = assert_well(train(changed))
    for change in (f"seed {SEED} -> 2", "phases.1.batch 12 -> 24", "phases.0.batch 24 -> 48 (that phase is done)"):
        assert f"changed since then: {change}\n" in output


@pytest.mark.slow
def test_another_vocabulary_is_refused_also_where_other_data_is_allowed(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    swapped(read_vocabulary(place.data), 100, 200).write(place.folder / "vocabulary")
    data, wiki = place.folder / "data", write_wiki(place.folder / "wiki", documents=60)
    shard(wiki, data, "--vocab", str(place.folder / "vocabulary" / "vocab.txt"))
    changed = dataclasses.replace(place, data=data).command(run, *SAVES, "--data.allow-other", "true")
    errors = assert_ended(launch(changed), 2, f"--data {data}: has another vocabulary than {run} was trained with; ")
    assert f"make it with shard.py --vocab {run}, " in errors
    assert read_vocabulary(run) == read_vocabulary(place.data), "it is left as it was"
    shard(wiki, place.folder / "cured", "--vocab", str(run))
    cured = dataclasses.replace(place, data=place.folder / "cured").command(run, *SAVES, "--data.allow-other", "true")
    assert "continues after step 5" in assert_well(train(cured))


def test_other_data_is_refused_unless_it_is_allowed(place: Place, straight: Path, other_data: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    changed = dataclasses.replace(place, data=other_data)
    errors = assert_ended(launch(changed.command(run)), 2)
    assert errors.startswith(f"error: --data {other_data}: {run} was trained on other data (fingerprint ")
    assert "allow it: --data.allow_other true" in errors
    output = assert_well(train(changed.command(run, "--data.allow-other", "true")))
    assert "no examples of length 64 are held out: no validation" in output
    assert [record["step"] for record in records(run)] == list(range(1, 9))
