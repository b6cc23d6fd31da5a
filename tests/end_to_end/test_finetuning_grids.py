"""Fine-tuning: files of any form, and grids of runs, side by side, killed, under launchers and on full disks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.base_models import write_bert
from support.commands import has_ended, wait_for
from support.finetuning import TASK, Toy, Tune, call, changed, fine_tune, kill_at, launch, outcome, results, slow_steps
from support.processes import ROOT, run_launcher, shell_environment
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well

from pretraining.processes.ending import Code
from pretraining.processes.group import disconnect

GRID = ["--learning-rates", "3e-3", "1e-3", "--seeds", "2"]
NAMES = ["lr0.001-seed1", "lr0.001-seed2", "lr0.003-seed1", "lr0.003-seed2"]
LONG = ["--epochs", "60", "--checkpoints.every", "20"]
ENTRY = str(ROOT / "finetuning" / "run_task.py")
HEAD = "text\tlabel\n"
LONG_TEXT = "film " * 10_000
UNUSUAL = f'{HEAD}a good film\tgood\na "fine" film, "good\tgood\n"\tbad\n{LONG_TEXT}\tgood\n\tgood\n'
"""Quotes, a very long text and an empty one, with the ends of lines of Windows."""


@pytest.fixture(scope="module")
def grid(shared_toy: Toy) -> dict[str, Any]:
    """What a grid leaves, where nothing happens to it."""
    assert_well(fine_tune(shared_toy.command("grid", *GRID)))
    return outcome(shared_toy.folder / "grid")


@pytest.fixture(scope="module")
def begun(shared_toy: Toy) -> Path:
    """The folder of a command that was killed in its first run."""
    run = launch(shared_toy.command("begun", "--checkpoints.every", "2"), fault=partial(kill_at, 3))
    assert [rank.code for rank in run.wait()] == [-signal.SIGKILL]
    return shared_toy.folder / "begun"


@pytest.mark.slow
def test_a_killed_grid_goes_on_where_it_was(toy: Toy, grid: dict[str, Any]) -> None:
    """What is done is not done again, nor what a smaller grid has done, and all is as it would have been."""
    assert_well(fine_tune(toy.command("killed", "--learning-rates", "1e-3")))
    run = launch(toy.command("killed", *GRID), fault=partial(kill_at, 7, "lr0.003-seed2"))
    assert [rank.code for rank in run.wait()] == [-signal.SIGKILL]
    done = {path: path.stat().st_mtime_ns for path in (toy.folder / "killed").glob("toy/*/results.json")}
    assert sorted(path.parent.name for path in done) == ["lr0.001-seed1", "lr0.003-seed1"]
    assert_well(fine_tune(toy.command("killed", *GRID)))
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert outcome(toy.folder / "killed") == grid
    assert sorted(results(toy.folder / "killed")["runs"]) == NAMES
    assert [path.parent.name for path in (toy.folder / "killed").glob("toy/**/model")] == ["toy"]
    said = assert_well(fine_tune(toy.command("killed", *GRID)))  # nothing is left to do
    assert "items/s" not in said
    assert outcome(toy.folder / "killed") == grid


@pytest.mark.parametrize(
    ("more", "change"),
    [
        (["--epochs", "3"], "settings.epochs: 2.0 -> 3.0"),
        (["--from-scratch"], "model.from_scratch: False -> True"),
        (["--model", "{folder}/model"], "model.checksum: "),
        (["--data"], "data.dev: 24 rows, checksum "),
    ],
)
def test_what_was_begun_otherwise_is_refused(
    toy: Toy, begun: Path, tmp_path: Path, more: list[str], change: str, tune: Tune
) -> None:
    """Also where the run was stopped before it had results."""
    before, data = outcome(begun), toy.data
    write_bert(tmp_path / "model", VOCABULARY, hidden=48)
    if more == ["--data"]:
        first, *rows, last = (data / "dev.tsv").read_text().splitlines()
        data, more = changed(toy, tmp_path / "data", {"dev.tsv": "\n".join([first, last, *rows])}), []
    errors = tune(toy.command(begun, *(word.format(folder=tmp_path) for word in more), data=data), code=2)
    assert f"error: {begun / 'toy' / 'lr0.003-seed1'}: this run was begun otherwise:" in errors
    assert change in errors
    assert "--out" in errors
    assert outcome(begun) == before


@pytest.mark.slow
def test_files_of_unusual_forms_are_taken(toy: Toy, tmp_path: Path) -> None:
    """With a BOM, more classes than rows, and one class of several."""
    rows, task = b"\xef\xbb\xbf" + UNUSUAL.replace("\n", "\r\n").encode(), f'{TASK}labels = ["good", "bad", "c", "d"]\n'
    unusual = changed(toy, tmp_path / "data", {"train.tsv": f"{HEAD}film\tgood\n", "dev.tsv": rows, "toy.toml": task})
    said = assert_well(fine_tune(toy.command("out", "--epochs", "1", data=unusual)))
    answers = (toy.folder / "out" / "toy" / "predictions" / "predictions_dev.tsv").read_text().splitlines()[1:]
    assert len(answers) == rows.count(b"\n") - 1
    assert "dev has what train never has, so that nobody can learn it: bad" in said


def test_two_commands_in_one_folder(toy: Toy, tune: Tune) -> None:
    run = launch(toy.command("out"), fault=partial(slow_steps, 60.0))
    wait_for(lambda: (toy.folder / "out" / "toy").exists())
    errors = tune(toy.command("out"), code=2)
    assert f"error: --out {toy.folder / 'out'}: process {run.pids[0]} on " in errors
    assert "wait for its end, or name another folder with --out" in errors
    run.end()


HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "a+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""
"""A worker whose command was killed, and which saves yet."""


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_group")
def test_a_run_that_another_process_has_is_waited_for(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = toy.folder / "out" / "toy" / "lr0.003-seed1" / "lock"
    lock.parent.mkdir(parents=True)
    for seconds, patience, code in ((60, 0.5, 2), (3, 30.0, 0)):
        monkeypatch.setattr("finetuning.session.workers.PATIENCE", patience)
        with subprocess.Popen([sys.executable, "-c", HOLD, str(lock), str(seconds)], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            assert call("run_task", toy.command("out")) == code
            other.kill()
        disconnect()
    assert "is at work in this folder" in capsys.readouterr().err
    assert results(toy.folder / "out")["best"] == "lr0.003-seed1"


def test_check_writes_nothing(toy: Toy, tune: Tune) -> None:
    before = sorted(toy.folder.rglob("*"))
    printed = tune(toy.command("out", *GRID, "--check"))
    assert sorted(toy.folder.rglob("*")) == before
    assert re.search(r"toy +classes +40 +24 +6 +4 +10\n", printed)
    for line in ("learning rates +0.003, 0.001", "seeds +1, 2", "precision +fp32", "at a time +1 of 4 runs"):
        assert re.search(f"{line} *", printed), line
    named = str(toy.folder), str(toy.data), "toy: "  # lines with folders, or of what was seen in the data, are as long
    assert all(len(line.rstrip()) <= 80 for line in printed.splitlines() if not any(name in line for name in named))


@pytest.mark.slow
def test_the_time_limit_stops_a_run(toy: Toy, straight_toy: dict[str, Any]) -> None:
    run = launch(toy.command("out", "--time-limit", "4s"), fault=partial(slow_steps, 0.7))
    errors = assert_ended(run, Code.STOPPED, "stopped by the time limit after step ")
    assert "the same command continues from there" in errors
    assert_well(fine_tune(toy.command("out")))
    assert outcome(toy.folder / "out") == straight_toy


# Side by side.


Start = Callable[..., subprocess.Popen[str]]
"""Starts a command with a worker, as a user does; it ends with the test."""


@pytest.fixture
def start(toy: Toy) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def call(*more: object) -> subprocess.Popen[str]:
        command = [sys.executable, ENTRY, *toy.command("out", *GRID, *more, "--search.jobs", "2")]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=shell_environment(), start_new_session=True, **pipes))
        return started[-1]

    yield call
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def long_grid(shared_toy: Toy) -> dict[str, Any]:
    """What a grid of longer runs leaves, where nothing happens to it."""
    assert_well(fine_tune(shared_toy.command("long", *GRID, *LONG)))
    return outcome(shared_toy.folder / "long")


def find_worker(out: Path, process: subprocess.Popen[str]) -> int:
    """Waits until the worker of a command has a run."""
    found: set[int] = set()

    def is_there() -> bool:
        owners = (re.match(r"process (\d+) on", path.read_text()) for path in out.glob("toy/*/lock"))
        found.update({int(owner[1]) for owner in owners if owner} - {process.pid})
        return bool(found)

    wait_for(is_there, 100)
    [worker] = found
    return worker


@pytest.mark.slow
def test_runs_side_by_side_are_those_one_after_another(toy: Toy, grid: dict[str, Any], start: Start) -> None:
    going = start()
    printed, errors = going.communicate(timeout=200)
    assert (going.returncode, errors) == (0, "")
    score = r"accuracy  dev \d+\.\d"
    for name in NAMES:  # whole lines, also from the worker
        assert len(re.findall(f"^toy {name}  {score} ± .* on 24  ", printed, re.MULTILINE)) == 1
        assert len(re.findall(f"^toy {name}  after step (?:5|10)  epoch .*  {score}$", printed, re.MULTILINE)) == 2
    assert "loss" not in printed  # steps are in the files of each
    assert outcome(toy.folder / "out") == grid


@pytest.mark.slow
def test_a_killed_worker(toy: Toy, long_grid: dict[str, Any], start: Start) -> None:
    """What it had begun, the command does itself."""
    going = start(*LONG)
    os.kill(find_worker(toy.folder / "out", going), signal.SIGKILL)
    going.communicate(timeout=200)
    assert going.returncode == 0
    assert outcome(toy.folder / "out") == long_grid


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75)])
def test_workers_end_with_their_command(
    toy: Toy, long_grid: dict[str, Any], start: Start, number: int, code: int
) -> None:
    """They save first, and the same command goes on with all."""
    going, out = start(*LONG), toy.folder / "out"
    worker = find_worker(out, going)
    os.kill(going.pid, number)
    _, errors = going.communicate(timeout=100)
    assert going.returncode == code
    assert "Traceback" not in errors
    wait_for(lambda: has_ended(worker))
    assert_well(fine_tune(toy.command("out", *GRID, *LONG)))
    assert outcome(out) == long_grid


# Launchers and disks.


@pytest.mark.slow
def test_mpirun(toy: Toy, straight_toy: dict[str, Any]) -> None:
    """torchrun is in docs/finetuning.md, whose commands are typed by tests/test_pages.py."""
    words = f"mpirun --allow-run-as-root --oversubscribe -n 2 {sys.executable} {ENTRY}"
    done = run_launcher([*words.split(), *toy.command("ranks")], {}, toy.folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert results(toy.folder / "ranks")["scores"] == straight_toy["toy/results.json"]["scores"]
    assert results(toy.folder / "ranks")["runs"]["lr0.003-seed1"]["ranks"] == 2


@pytest.mark.slow
def test_a_full_disk(toy: Toy, disk: Path) -> None:
    """Nothing half-written is left under its own name, and the same command goes on where there is room."""
    assert_well(fine_tune(toy.command("straight"), 2))
    for size, more in ((60, []), (300, ["--checkpoints.every", "2"])):  # too small for a model, for a checkpoint
        subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
        errors = assert_ended(launch(toy.command(disk / "out", *more), ranks=2), 2, "No space left on device")
        assert "error: " in errors
        assert not list(disk.rglob("model.safetensors"))
        assert not list(disk.glob("out/toy/*/results.json"))
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert_well(fine_tune(toy.command(disk / "out"), 2))
    assert outcome(disk / "out") == outcome(toy.folder / "straight")
