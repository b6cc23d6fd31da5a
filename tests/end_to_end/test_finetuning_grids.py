"""Grids of fine-tuning runs: side by side, killed, on full disks; and what a command refuses."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.base_models import write_bert
from support.commands import has_ended, wait_for
from support.finetuning import Toy, Tune, fine_tune, kill_at, launch, outcome, results, slow_steps
from support.processes import ROOT
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well

from pretraining.processes.ending import Code

GRID = ["--search.learning_rates", "[3e-3, 1e-3]", "--seeds", "2"]
NAMES = ["lr0.001-seed1", "lr0.001-seed2", "lr0.003-seed1", "lr0.003-seed2"]
LONG = ["--epochs", "60", "--checkpoints.every", "20"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
ENTRY = str(ROOT / "finetuning" / "run_task.py")


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
    assert_well(fine_tune(toy.command("killed", "--learning_rate", "1e-3")))
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


def test_what_was_begun_otherwise_is_refused(toy: Toy, begun: Path, tmp_path: Path, tune: Tune) -> None:
    """All that differs is told, also where the run was stopped before it had results."""
    before, data = outcome(begun), Path(shutil.copytree(toy.data, tmp_path / "data"))
    first, second, *others = (data / "dev.tsv").read_text().splitlines()
    (data / "dev.tsv").write_text("\n".join([first, *others, second]))
    model = write_bert(tmp_path / "model", VOCABULARY, hidden=48)
    words = ["--model", model, *"--from-scratch --precision.dtype bf16 --epochs 3".split()]
    errors = tune(toy.command(begun, *words, data=data), code=2)
    assert f"error: {begun / 'toy' / 'lr0.003-seed1'}: this run was begun otherwise:" in errors
    for told in ("2.0 -> 3.0", "fp32 -> bf16", "from_scratch: False -> True", "model.checksum", "data.dev: 24 rows"):
        assert told in errors
    assert ("--out" in errors, outcome(begun)) == (True, before)


def test_two_commands_in_one_folder(toy: Toy, tune: Tune) -> None:
    run = launch(toy.command("out"), fault=partial(slow_steps, 60.0))
    wait_for(lambda: (toy.folder / "out" / "toy").exists())
    errors = tune(toy.command("out"), code=2)
    assert f"error: --out {toy.folder / 'out'}: process {run.pids[0]} on " in errors
    assert "wait for its end, or name another folder with --out" in errors
    run.end()


HOLD = "import fcntl, sys, time\nfile = open(sys.argv[1], 'a+')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
HOLD += "print('held', flush=True)\ntime.sleep(float(sys.argv[2]))"
"""A worker whose command was killed, and which saves yet."""


@pytest.mark.slow
def test_a_run_that_another_process_has_is_waited_for(toy: Toy, monkeypatch: pytest.MonkeyPatch, tune: Tune) -> None:
    lock = toy.folder / "out" / "toy" / "lr0.003-seed1" / "lock"
    lock.parent.mkdir(parents=True)
    for seconds, patience, code in ((60, 0.5, 2), (3, 30.0, 0)):
        monkeypatch.setattr("finetuning.session.workers.PATIENCE", patience)
        with subprocess.Popen([sys.executable, "-c", HOLD, str(lock), str(seconds)], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            assert ("is at work in this folder" in tune(toy.command("out"), code=code)) == (code == 2)
            other.kill()
    assert results(toy.folder / "out")["best"] == "lr0.003-seed1"


def test_check_writes_nothing(toy: Toy, tune: Tune) -> None:
    before = sorted(toy.folder.rglob("*"))
    printed = tune(toy.command("out", *GRID, "--check"))
    assert sorted(toy.folder.rglob("*")) == before
    lines = "toy +classes +40 +24 +6 +4 +10\n|learning rates +0.003, 0.001|batch +8|seeds +1, 2|precision +fp32"
    for line in (*lines.split("|"), "at a time +1 of 4 runs"):
        assert re.search(line, printed), line


@pytest.mark.slow
def test_the_time_limit_stops_a_run(toy: Toy, straight_toy: dict[str, Any]) -> None:
    run = launch(toy.command("out", "--time-limit", "4s"), fault=partial(slow_steps, 0.7))
    errors = assert_ended(run, Code.STOPPED, "stopped by the time limit after step ")
    assert "the same command continues from there" in errors
    assert_well(fine_tune(toy.command("out")))
    assert outcome(toy.folder / "out") == straight_toy


# Side by side.


def start(toy: Toy, out: str, *more: object) -> subprocess.Popen[str]:
    """A command with a worker, as a user starts it."""
    command = [sys.executable, ENTRY, *toy.command(out, *GRID, *more, "--search.jobs", "2")]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, start_new_session=True, **streams)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands of a test, which end with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
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
def test_runs_side_by_side_are_those_one_after_another(
    toy: Toy, grid: dict[str, Any], ended: list[subprocess.Popen[str]]
) -> None:
    ended.append(start(toy, "out"))
    printed, errors = ended[0].communicate(timeout=200)
    assert (ended[0].returncode, errors) == (0, "")
    score = r"accuracy  dev \d+\.\d"
    for name in NAMES:  # whole lines, also from the worker
        assert len(re.findall(f"^toy {name}  {score} ± .* on 24  ", printed, re.MULTILINE)) == 1
        assert len(re.findall(f"^toy {name}  after step (?:5|10)  epoch .*  {score}$", printed, re.MULTILINE)) == 2
    assert "loss" not in printed  # steps are in the files of each
    assert outcome(toy.folder / "out") == grid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [("worker", signal.SIGKILL, 0), ("command", signal.SIGKILL, -9), ("command", signal.SIGTERM, 75)],
)
def test_a_command_does_what_a_killed_worker_had_begun_and_workers_end_with_their_command(
    toy: Toy, long_grid: dict[str, Any], ended: list[subprocess.Popen[str]], victim: str, number: int, code: int
) -> None:
    """They save first, and the same command goes on with all."""
    ended.append(start(toy, "out", *LONG))
    worker = find_worker(toy.folder / "out", ended[0])
    os.kill(worker if victim == "worker" else ended[0].pid, number)
    _, errors = ended[0].communicate(timeout=200)
    assert ended[0].returncode == code
    assert victim == "worker" or "Traceback" not in errors
    wait_for(lambda: has_ended(worker))
    if code:
        assert_well(fine_tune(toy.command("out", *GRID, *LONG)))
    assert outcome(toy.folder / "out") == long_grid


# Disks.


@pytest.mark.slow
def test_a_full_disk(toy: Toy, disk: Path) -> None:
    """Nothing half-written is left under its own name, and the same command goes on where there is room."""
    assert_well(fine_tune(toy.command("straight"), 2))
    for size, more in ((60, []), (300, ["--checkpoints.every", "2"])):  # too small for a model, for a checkpoint
        subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
        errors = assert_ended(launch(toy.command(disk / "out", *more), 2), 2, "No space left on device")
        assert "error: " in errors
        assert not list(disk.rglob("model.safetensors"))
        assert not list(disk.glob("out/toy/*/results.json"))
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert_well(fine_tune(toy.command(disk / "out"), 2))
    assert outcome(disk / "out") == outcome(toy.folder / "straight")
