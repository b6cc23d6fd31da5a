"""The run folder: it belongs to one run at a time, and what may change between two runs in it."""

import dataclasses
import re
import shlex
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
from conftest import write_wiki
from support.base_models import swapped
from support.faults import stop_at
from support.shards import run as shard
from support.training import (
    ENDLESS,
    SAVES,
    SEED,
    Place,
    assert_ended,
    assert_refused,
    contents,
    everything,
    records,
    stopped_at,
)

from data_prep.common.capacity import num_cores
from data_prep.vocabulary.source import read_vocabulary
from pretraining import export as exporting
from pretraining.checkpoint.record import RECORD, list_finished
from pretraining.processes.ending import Code


def test_a_run_is_not_put_into_its_shards_nor_into_a_checkpoint(tmp_path: Path) -> None:
    command = ["--recipe", "demo", "--data", str(tmp_path / "data"), "--out"]
    inside, checkpoint = tmp_path / "data" / "run", tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / RECORD).write_text("{}")
    told = f"--out {inside}: lies in --data {tmp_path / 'data'}, which a run must not change"
    assert_refused([*command, str(inside)], told)
    assert_refused([*command, str(checkpoint)], f"--out {checkpoint}: is a checkpoint; name its run, or a new folder")
    assert [*tmp_path.iterdir()] == [checkpoint]
    assert [*checkpoint.iterdir()] == [checkpoint / RECORD]


def test_a_folder_belongs_to_one_run(place: Place) -> None:
    """Until it ends, also where it is killed."""
    run, first = place.folder / "run", place.launch("run", *ENDLESS, ranks=1)
    first.reach(1)
    owner = f"process {first.pids[0]} on {socket.gethostname()}"
    assert_refused(place.command("run", *ENDLESS), f"error: --out {run}: {owner} is training in this folder")
    first.reach(first.step + 1)
    first.signal(signal.SIGKILL)
    assert [rank.code for rank in first.wait()] == [-signal.SIGKILL]
    second = place.launch("run", *ENDLESS, ranks=1, fault=partial(stop_at, first.step + 1))
    assert_ended(second, Code.STOPPED, "stopped by a signal")
    assert [record["step"] for record in records(run)] == list(range(1, first.step + 2))


CHANGES = """
compute.threads 999 not set -> 999
checkpoints.every 3 1 -> 3
logging.every 2 1 -> 2
model.dropout 0.2 0.1 -> 0.2
parallel.zero 2 1 -> 2
phases.0.learning_rate 1e-3 0.002 -> 0.001
phases.0.micro_batch 2 4 -> 2
phases.0.steps 4 5 -> 4
precision.dtype bf16 fp32 -> bf16
"""
"""What may change in a run: a setting, the new value, and what is told."""


def test_what_may_change_is_told(place: Place, straight: Path) -> None:
    """And how many threads a rank has, which decides how sums are rounded."""
    threads = max(1, num_cores() // 2)
    rows = [line.split(maxsplit=2) for line in CHANGES.replace("999", str(threads + 1)).split("\n") if line]
    run = stopped_at(straight, place.folder / "run", 3)
    words = [word for name, value, _ in rows for word in (f"--{name}", value)]
    output = place.train("run", "--checkpoints.keep", "9", "--phases.1.steps", "2", *words)
    told = re.findall(r"^changed since then: (.*)", output, re.MULTILINE)
    wanted = [*(f"{name} {change}" for name, _, change in rows), "phases.1.steps 3 -> 2"]
    assert sorted(told) == sorted([*wanted, f"threads of a rank {threads} -> {threads + 1}"])
    assert "continues after step 3\n" in output
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 6]


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
        assert_refused(place.command(run, *words.split()), told, "\nundo these, or name a new folder\n")
    assert {path: contents(path) for path in list_finished(run)} == there


def test_a_finished_run_that_is_started_again_writes_nothing(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    before = everything(run)
    hows = ["--logging.every", "2", "--parallel.zero", "2", "--phases.0.micro_batch", "2", "--stop-after", "short"]
    for words in ([], hows):
        output = place.train(run, *SAVES, *words)
        assert f"{run}: all that was asked for is trained already\n" in output
        assert "exported" not in output
        assert everything(run) == before
    shutil.rmtree(run / "export")
    assert "export: exported 37,383 parameters" in place.train(run, *SAVES)
    assert everything(run) == before


MORE = {
    "--phases.0.steps 9": "phases.0.steps was 5, now 9",
    "--phases.0.learning_rate 1e-4": "phases.0.learning_rate was 0.002, now 0.0001",
    "--seed 2": f"seed was {SEED}, now 2",
    "--recipe {longer}": "phases.2.steps was not set, now 3",
    "--data {other}": "the fingerprint of the data was ",
    "--phases.1.steps 9": "phases.1.steps was 3, now 9",
}


def test_a_finished_run_that_is_asked_for_more_names_the_command_that_does_it(
    place: Place, straight: Path, other_data: Path
) -> None:
    """test_branches.py has the commands."""
    run, longer = shutil.copytree(straight, place.folder / "run"), place.folder / "longer.toml"
    phase = '[[phases]]\nname = "third"\nlength = 64\nbatch = 12\nmicro_batch = 2\nsteps = 3\n'
    longer.write_text(place.recipe.read_text() + phase)
    before = everything(run)
    for words, change in MORE.items():
        command = place.command(run, *words.format(longer=longer, other=other_data).split())
        errors = assert_refused(command, f"  {change}")
        assert errors.startswith(f"error: --out {run}: is trained to its end\n")
        assert f": --init {run} --out NEW\n" in errors
    assert f"in more steps or phases: --branch {run} --out NEW\n" in errors
    errors = assert_refused(place.command(run, "--model.layers", "3"), "model.layers was 2, now 3")
    assert errors.endswith("\nname a new folder\n"), "its weights do not fit"
    assert everything(run) == before


def test_a_licence_needs_no_training(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    command = place.command(run, "--card.licence", "apache-2.0")
    errors = assert_refused(command, "  card.licence was not set, now apache-2.0\n")
    export = shlex.split(errors.splitlines()[-1].partition(": ")[2])
    assert export[:2] == ["python", "pretraining/export.py"]
    assert exporting.main(export[2:]) == 0
    assert "license: apache-2.0" in (run / "export" / "README.md").read_text()


def test_a_licence_stays_where_a_later_command_names_none(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 6)
    place.train(run, "--card.licence", "mit", *SAVES, ranks=1)
    stopped_at(run, place.folder / "again", 7)
    place.train("again", *SAVES, ranks=1)
    for folder in (run, place.folder / "again"):
        assert 'licence = "mit"' in (folder / "recipe.toml").read_text()
        assert "license: mit" in (folder / "export" / "README.md").read_text()


def test_steps_that_are_added_are_trained(place: Place, straight: Path) -> None:
    """In the phase that a run is in, or in one that is to come: by the schedule of a run that always had them.

    Those of a phase that is done are refused.
    """
    more = ["--phases.0.steps", "7", "--phases.1.steps", "4"]
    place.train("straight on", *more, "--phases.0.batch", "4", "--phases.1.batch", "2", ranks=1)
    run = stopped_at(straight, place.folder / "run", 3)
    fewer = place.command("run", *SAVES, "--phases.0.steps", "2")
    assert_refused(fewer, "phases.0 has 2 steps in this recipe, of which 3 are done")
    output = place.train("run", *more, ranks=1)
    for change in ("phases.0.steps 5 -> 7", "phases.1.steps 3 -> 4"):
        assert f"changed since then: {change}\n" in output
    ours, theirs = records(run), records(place.folder / "straight on")
    assert [record["step"] for record in ours] == list(range(1, 12))
    assert [record["learning_rate"] for record in ours[3:]] == [record["learning_rate"] for record in theirs[3:]]
    later = stopped_at(straight, place.folder / "later", 6)
    again = place.command(later, *SAVES, "--phases.0.steps", "9")
    assert_refused(again, "  phases.0.steps (which is done) was 5, now 9\n")


@pytest.mark.slow
def test_between_phases_more_may_change(place: Place, straight: Path) -> None:
    stopped_at(straight, place.folder / "run", 5)
    output = place.train("run", "--seed", 2, "--phases.1.batch", 24, "--phases.0.batch", 48)
    for change in (f"seed {SEED} -> 2", "phases.1.batch 12 -> 24", "phases.0.batch 24 -> 48 (that phase is done)"):
        assert f"changed since then: {change}\n" in output


@pytest.mark.slow
def test_another_vocabulary_is_refused_also_in_a_branch(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    swapped(read_vocabulary(place.data), 100, 200).write(place.folder / "vocabulary")
    data, wiki = place.folder / "data", write_wiki(place.folder / "wiki", documents=60)
    shard(wiki, data, "--vocab", str(place.folder / "vocabulary" / "vocab.txt"))
    changed = dataclasses.replace(place, data=data).command("new", "--branch", run)
    errors = assert_refused(changed, f"--data {data}: has another vocabulary than {run} was trained with; ")
    assert f"make it with shard.py --vocab {run}, " in errors
    assert read_vocabulary(run) == read_vocabulary(place.data), "it is left as it was"
    shard(wiki, place.folder / "cured", "--vocab", str(run))
    cured = dataclasses.replace(place, data=place.folder / "cured")
    assert "branch of run after step 5" in cured.train("new", "--branch", run, ranks=1)


def test_other_data_is_for_a_branch(place: Place, straight: Path, other_data: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    changed = dataclasses.replace(place, data=other_data)
    errors = assert_refused(changed.command(run), f"go on with these in a branch: --branch {run} --out NEW")
    assert errors.startswith(f"error: --data {other_data}: {run} was trained on other data (fingerprint ")
    output = changed.train("new", "--branch", run, ranks=1)
    assert "the fingerprint of the data " in output
    assert "no examples of length 64 are held out: no validation" in output
    assert [record["step"] for record in records(place.folder / "new")] == list(range(1, 9))
