"""The run folder: it belongs to one run at a time, and what may change between two runs in it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import socket
from pathlib import Path

from support.training import (
    ENDLESS,
    SEED,
    Place,
    assert_ended,
    assert_well,
    contents,
    launch,
    records,
    stopped_at,
    train,
)

from pretraining.checkpoint.record import finished_checkpoints
from pretraining.processes.ending import Code


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
    changes = {
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
    assert sorted(told) == sorted(f"{name} {then} -> {now}" for name, (then, now) in changes.items())
    assert "continues after step 3\n" in output
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4, 5, 6, 8]


MUST_STAY = {
    "--model.layers 3": "the model Shape(layers=2",
    "--optimizer.name lamb": "optimizer.name adamw, and this is lamb;",
    "--phases.1.name other": "the phases ['short', 'long'], and this is ['short', 'other'];",
    "--phases.0.batch 48": "phases.0.batch 24, and this is 48;",
    "--phases.0.length 64": "phases.0.length 32, and this is 64;",
    "--seed 2": f"seed {SEED}, and this is 2;",
}


def test_what_must_stay_is_refused(place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 3)
    there = {path: contents(path) for path in finished_checkpoints(run)}
    for words, message in MUST_STAY.items():
        refused = launch(place.command(run, *words.split()), ranks=1)
        assert_ended(refused, 2, "error: ", f"error: --out {run}: was trained with {message}")
    assert {path: contents(path) for path in finished_checkpoints(run)} == there


def test_what_a_run_that_is_done_cannot_be_continued_with(place: Place, straight: Path) -> None:
    run = shutil.copytree(straight, place.folder / "run")
    messages = {
        "--resume never": "has checkpoints; name a new folder, or leave out --resume never",
        "--model.layers 3": "was trained with the model Shape(layers=2",
        "--phases.1.name other": "was trained with the phases ['short', 'long'], and this is ['short', 'other']",
        "--optimizer.name lamb": "was trained with optimizer.name adamw, and this is lamb; name a new folder",
    }
    for words, message in messages.items():
        assert_ended(launch(place.command(run, *words.split()), ranks=1), 2, "error:", message)


def test_between_phases_more_may_change(place: Place, straight: Path) -> None:
    stopped_at(straight, place.folder / "run", 5)
    changed = place.command("run", "--seed", 2, "--phases.1.batch", 24, "--phases.0.batch", 48)
    output = assert_well(train(changed))
    for change in (f"seed {SEED} -> 2", "phases.1.batch 12 -> 24", "phases.0.batch 24 -> 48"):
        assert f"changed since then: {change}\n" in output


def test_other_data_is_refused_unless_it_is_allowed(place: Place, straight: Path, other_data: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 5)
    changed = dataclasses.replace(place, data=other_data)
    errors = assert_ended(launch(changed.command(run)), 2)
    assert errors.startswith(f"error: --data {other_data}: {run} was trained on other data (fingerprint ")
    assert "allow it: --data.allow_other true" in errors
    output = assert_well(train(changed.command(run, "--data.allow-other", "true")))
    assert "no examples of length 64 are held out: no validation" in output
    assert [record["step"] for record in records(run)] == list(range(1, 9))
