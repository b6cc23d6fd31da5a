"""Faults that a run survives: kills, damage, disks, recipes that change, signals, NaNs, clocks that jump.

Each run is the real command. Its ranks are forked from a process that has loaded all modules, which saves their start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.processes import LAUNCHERS, ROOT, Done, free_port
from support.training import Place, measured, records, state, wait_for
from torch import Tensor

from data_prep.common.errors import UserError
from data_prep.shards import Manifest
from pretraining import train as entry
from pretraining.checkpoint import writing as saving
from pretraining.checkpoint.reading import DAMAGED, FOLDER, KINDS, RECORD, finished, newest_whole, read_record
from pretraining.config.settings import Checkpoints
from pretraining.data.batches import step_batches
from pretraining.data.dataset import Dataset
from pretraining.data.order import Order, fold
from pretraining.engine.engine import Engine
from pretraining.model.bert import Bert, Losses
from pretraining.processes import stopping as control
from pretraining.processes.ending import INTERRUPTION, Code, exit_now
from pretraining.processes.stopping import time_limit
from pretraining.training.guards import SKIPPED, Guard, Skip, batch_number, first_of, read_skips, write_skips
from pretraining.training.resume import alone_in
from pretraining.training.trainer import Trainer

SAVES = ["--checkpoints.every", "1", "--checkpoints.keep", "9"]
LONG = ["--phases.0.steps", "30", "--checkpoints.every", "1"]
"""a run of 33 steps"""
ENDLESS = ["--phases.0.steps", "5000", "--checkpoints.every", "1"]
SEED = 12345
"""of a recipe that says none"""


def slow(*values: Any) -> Any:
    """A parameter of tests that are run with the slow ones."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Ranks.


def serve() -> None:
    """What the process does that ranks are forked from: a rank for each line, or its exit code if it has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print while they are loaded is no answer
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - loads the compiler, as a run does
    import torch._dynamo  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "pid" in order:
            pid, status = os.waitpid(order["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork() or be_rank(**order)
        print(json.dumps(answer), file=answers, flush=True)


def be_rank(streams: list[str], environment: dict[str, str], fault: list[Any], command: list[str]) -> NoReturn:
    """One rank of a run, with a fault: the name of a function that is called before, and its arguments."""
    code = 1
    try:
        os.setsid()
        opened = [os.open(path, os.O_CREAT | os.O_WRONLY) for path in streams]
        for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), *opened]):
            os.dup2(descriptor, number)
        os.environ.update(environment)
        control.STARTED = time.monotonic()
        if fault:
            globals()[fault[0]](*fault[1:])
        code = entry.main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        exit_now(code)
    raise AssertionError


class Run:
    """The ranks of a run that goes on."""

    def __init__(self, ask: Callable[..., Any], pids: list[int], streams: list[list[Path]]):
        self._ask, self.pids, self._streams = ask, pids, streams
        self._codes: list[int | None] = [None] * len(pids)

    @property
    def step(self) -> int:
        """The last that rank 0 has told of; 0 before."""
        told = re.findall(r"^ *(\d+)/\d+  loss", self._streams[0][0].read_text(), re.MULTILINE)
        return int(told[-1]) if told else 0

    def reach(self, step: int) -> None:
        """Waits for a step."""
        wait_for(lambda: self.step >= step or not self.goes_on())
        assert self.goes_on(), "it ended before it was to"

    def goes_on(self) -> bool:
        """Whether any rank has not ended."""
        for rank, code in enumerate(self._codes):
            if code is None:
                self._codes[rank] = self._ask(pid=self.pids[rank])
        return None in self._codes

    def signal(self, number: int, *ranks: int) -> None:
        """To these ranks, by default to all."""
        self.goes_on()
        for rank in ranks or range(len(self.pids)):
            if self._codes[rank] is None:
                os.kill(self.pids[rank], number)

    def wait(self, seconds: float = 90.0) -> list[Done]:
        """For the end of all ranks."""
        deadline = time.monotonic() + seconds
        while self.goes_on() and time.monotonic() < deadline:
            time.sleep(0.02)
        late = self.goes_on()
        self.end()
        texts = [[path.read_text() for path in paths] for paths in self._streams]
        assert not late, f"ranks did not end: {texts}"
        return [Done(code or 0, *text) for code, text in zip(self._codes, texts, strict=True)]

    def end(self) -> None:
        """Ends what has not ended."""
        while self.goes_on():
            self.signal(signal.SIGKILL)
            time.sleep(0.02)


class Home:
    """The process that ranks are forked from."""

    def __init__(self, folder: Path):
        self._folder, self._numbers = folder, itertools.count()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        paths = [ROOT, ROOT / "tests", Path(__file__).parent]
        settings = {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {Path(__file__).stem} as tests; tests.serve()"],
            cwd=ROOT,
            env={**kept, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        command: Sequence[object],
        ranks: int = 2,
        fault: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
        begun: int | None = None,
    ) -> Run:
        """A run, of whose ranks perhaps only the first `begun` come."""
        port, pids, streams = free_port(), [], []
        for rank in range(ranks if begun is None else begun):
            streams.append([self._folder / f"{next(self._numbers)}-{rank}-{what}" for what in ("output", "errors")])
            place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            variables = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environment or {})}
            order = {
                "streams": list(map(str, streams[-1])),
                "environment": {name: str(value) for name, value in variables.items()},
                "fault": list(fault),
                "command": list(map(str, command)),
            }
            pids.append(self.ask(**order))
            for path in streams[-1]:
                wait_for(path.exists)
        return Run(self.ask, pids, streams)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    opened = Home(tmp_path_factory.mktemp("streams"))
    yield opened
    opened.close()


Launch = Callable[..., Run]


@pytest.fixture
def launch(home: Home) -> Iterator[Launch]:
    """Starts runs, and leaves none behind."""
    begun: list[Run] = []

    def start(*arguments: Any, **more: Any) -> Run:
        begun.append(home.start(*arguments, **more))
        return begun[-1]

    yield start
    for run in begun:
        run.end()


def train_straight(home: Home, place: Place, name: str, *more: object) -> Path:
    """A run that nothing happens to."""
    done = home.start(place.command(name, *more)).wait()
    assert [(each.code, each.errors) for each in done] == [(0, "")] * 2
    return place.folder / name


@pytest.fixture(scope="module")
def straight(home: Home, shared: Place) -> Path:
    """Five steps of the first phase and three of the second, with all their checkpoints."""
    return train_straight(home, shared, "survival straight", *SAVES)


@pytest.fixture(scope="module")
def long(home: Home, shared: Place) -> Path:
    """Thirty steps of the first phase."""
    return train_straight(home, shared, "survival long", *LONG)


def assert_same(run: Path, wanted: Path) -> None:
    """Weights, moments and metrics, bit for bit."""
    ours, theirs = state(run), state(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert measured(run) == measured(wanted)
    assert not [path for path in (run / FOLDER).iterdir() if path.suffix in (".tmp", ".old")]


def assert_ended(run: Run, code: int, *messages: str) -> str:
    """All ranks with this code; rank 0 says why, once, and the others nothing. Returns what it says."""
    done = run.wait()
    assert [each.code for each in done] == [code] * len(done), [each.errors for each in done]
    for message in messages:
        assert done[0].errors.count(message) == 1, done[0].errors
    assert not any(each.errors for each in done[1:]), done
    assert "Traceback" not in done[0].errors
    return done[0].errors


def stopped_at(source: Path, run: Path, step: int) -> Path:
    """A copy of a run that ended after a step."""
    shutil.copytree(source, run)
    for path in finished(run):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Kills.


def slow_save(seconds: float) -> None:
    """A fault: every file of a checkpoint takes longer."""
    compare = saving._compare

    def slowly(path: Path, tensors: dict[str, Tensor]) -> None:
        time.sleep(seconds)
        compare(path, tensors)

    saving._compare = slowly


def kill(launch: Launch, command: list[object], checkpoints: Path, step: int, draw: random.Random, save: bool) -> None:
    """A rank at a random moment after a step, or inside a save; the other must end by itself."""
    run = launch(command, fault=["slow_save", 0.05] if save else [])
    run.reach(step)
    if save:
        wait_for(lambda: any(not (each / RECORD).exists() for each in checkpoints.glob("*.tmp")))
    else:
        time.sleep(draw.uniform(0, 0.05))
    victim = draw.randrange(2)
    run.signal(signal.SIGKILL, victim)
    done = run.wait()
    assert {each.code for each in done} == {-signal.SIGKILL, Code.RANK_LOST}, done
    assert done[victim].code == -signal.SIGKILL
    assert re.match(rf"error: rank {victim} has ended, or ", done[1 - victim].errors), done
    if save and victim == 0:
        assert list(checkpoints.glob("*.tmp")), "it was to be killed inside a save"


def kill_and_compare(place: Place, launch: Launch, wanted: Path, more: list[str], last: int, kills: int) -> None:
    """Kills at so many moments that are uniform over the run, every third inside a save."""
    draw, command = random.Random(kills), place.command("run", *more)
    for number, step in enumerate(sorted(draw.sample(range(1, last), kills))):
        kill(launch, command, place.folder / "run" / FOLDER, step, draw, save=number % 3 == 1)
    done = launch(command).wait()
    assert [each.code for each in done] == [0, 0]
    assert "continues after step" in done[0].output
    assert_same(place.folder / "run", wanted)


def test_a_run_whose_ranks_are_killed_is_the_straight_one(place: Place, launch: Launch, long: Path) -> None:
    kill_and_compare(place, launch, long, LONG, last=18, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_after_thirty_kills(place: Place, launch: Launch, home: Home) -> None:
    more = ["--phases.0.steps", "300", "--phases.1.steps", "100", "--checkpoints.every", "1", "--parallel.zero", "2"]
    wanted = train_straight(home, place, "straight", *more)
    kill_and_compare(place, launch, wanted, more, last=380, kills=30)


# Damaged checkpoints.


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_number(path: Path) -> None:
    """Still good JSON, and still a number of steps."""
    content = path.read_text()
    assert '"phase_step": 1,' in content
    path.write_text(content.replace('"phase_step": 1,', '"phase_step": 0,'))


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "flipped": flip, "missing": Path.unlink}
FILES = [*(f"{kind}-00001-of-00002.safetensors" for kind in KINDS), RECORD]
CASES = [*itertools.product(FILES, DAMAGES.values()), (RECORD, change_number)]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_checkpoint_is_named_and_left(
    straight: Path, tmp_path: Path, alone: None, file: str, damage: Callable[[Path], None]
) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    before, newest = finished(run)[-2:]
    damage(newest / file)
    there, warnings = contents(newest), list[str]()
    assert newest_whole(run, warnings.append) == before
    [warning] = warnings
    assert str(newest / file) in warning
    assert f"{newest} is left as it is" in warning
    marked = contents(newest)
    assert str(newest / file) in marked.pop(DAMAGED).decode()
    assert marked == there
    assert newest_whole(run, warnings.append) == before
    assert len(warnings) == 1, "it is told once"


def test_a_repaired_checkpoint_counts_again(straight: Path, tmp_path: Path, alone: None) -> None:
    run = stopped_at(straight, tmp_path / "run", 6)
    newest = finished(run)[-1]
    (newest / RECORD).rename(tmp_path / "kept")
    assert newest_whole(run, lambda _: None) != newest
    (tmp_path / "kept").rename(newest / RECORD)
    (newest / DAMAGED).unlink()
    assert newest_whole(run, lambda _: None) == newest


@pytest.mark.parametrize(("file", "damage"), [(FILES[0], flip), slow(FILES[2], truncate), slow(RECORD, Path.unlink)])
def test_a_run_goes_on_from_the_checkpoint_before(
    place: Place, launch: Launch, straight: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """What was damaged gives up its place when its step is saved again, and is kept beside it."""
    run = stopped_at(straight, place.folder / "run", 6)
    newest = finished(run)[-1]
    damage(newest / file)
    there = contents(newest)
    going = launch(place.command("run", *SAVES))
    assert_ended(going, 0, f"warning: {newest / file}: ", f"{newest} is left as it is")
    assert_same(run, straight)
    kept = contents(newest.with_name(newest.name + ".damaged"))
    assert kept.pop(DAMAGED)
    assert kept == there
    assert newest in finished(run)


def test_a_run_with_damaged_checkpoints_alone_does_not_begin_anew(place: Place, launch: Launch, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 2)
    first, second = finished(run)
    flip(first / FILES[0])
    (second / RECORD).unlink()
    there = [contents(each) for each in (first, second)]
    for time_of in ("first", "second"):
        errors = assert_ended(launch(place.command("run", *SAVES)), 2, "error: ", "every checkpoint is damaged: step-")
        assert (str(first / FILES[0]) in errors) == (time_of == "first")
    for folder, before in zip((first, second), there, strict=True):
        after = contents(folder)
        assert after.pop(DAMAGED)
        assert after == before
    assert len(list((run / FOLDER).iterdir())) == 2


# Read-only disks.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield folder
    for each in (folder / "run" / FOLDER, folder):
        subprocess.run(["umount", "-l", each], capture_output=True)


def test_a_read_only_disk_at_the_start(place: Place, launch: Launch, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    going = launch(dataclasses.replace(place, folder=disk).command("run"))
    assert_ended(going, 2, f"error: rank 0: --run {disk / 'run'}: cannot be written: Read-only file system")


def test_a_disk_that_is_full_at_the_start(place: Place, launch: Launch, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64k", disk], check=True)
    with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    going = launch(dataclasses.replace(place, folder=disk).command("run"))
    assert_ended(going, 2, "error: ", "cannot be written: No space left on device")


def test_a_disk_that_becomes_read_only(place: Place, launch: Launch, disk: Path) -> None:
    going = launch(dataclasses.replace(place, folder=disk).command("run", *ENDLESS))
    going.reach(3)
    checkpoints = disk / "run" / FOLDER
    subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)
    errors = assert_ended(going, 2, "error: ", "cannot be written: Read-only file system\n")
    assert "the same command goes on from the last one" in errors
    assert "make room" not in errors
    assert finished(disk / "run")


# Two runs in one folder.


def test_a_folder_belongs_to_one_run(place: Place, launch: Launch) -> None:
    command, run = place.command("run", *ENDLESS), place.folder / "run"
    first = launch(command)
    first.reach(2)
    owner = f"process {first.pids[0]} on {socket.gethostname()}"
    before = first.step
    assert_ended(launch(command), 2, f"error: rank 0: --run {run}: {owner} is training in this folder")
    first.reach(before + 2)
    first.signal(signal.SIGUSR1)
    assert_ended(first, Code.STOPPED, "stopped by a signal")
    second = launch(command)
    second.reach(first.step + 1)
    second.signal(signal.SIGKILL)
    assert [each.code for each in second.wait()] == [-signal.SIGKILL] * 2
    third = launch(command)
    third.reach(second.step + 1)
    third.signal(signal.SIGUSR1)
    assert_ended(third, Code.STOPPED)
    assert [each["step"] for each in records(run)] == list(range(1, third.step + 1))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with alone_in(tmp_path / "run"):
        assert (tmp_path / "run" / "lock").exists()


# Recipes that have changed.


def test_what_may_change_is_told(place: Place, launch: Launch, straight: Path) -> None:
    changes = {
        "checkpoints.every": (1, 3),
        "logging.every": (1, 2),
        "model.dropout": (0.1, 0.2),
        "optimizer.weight_decay": (0.01, 0.02),
        "parallel.zero": (1, 2),
        "phases.0.micro_batch": (4, 2),
        "phases.0.learning_rate": (0.002, 0.001),
        "precision.dtype": ("fp32", "bf16"),
    }
    run = stopped_at(straight, place.folder / "run", 3)
    words = [word for name, (_, now) in changes.items() for word in (f"--{name}", now)]
    done = launch(place.command("run", "--checkpoints.keep", "9", *words)).wait()
    assert [(each.code, each.errors) for each in done] == [(0, "")] * 2
    told = re.findall(r"^changed since then: (.*)", done[0].output, re.MULTILINE)
    assert sorted(told) == [f"{name} {then} -> {now}" for name, (then, now) in changes.items()]
    assert "continues after step 3\n" in done[0].output
    assert [each["step"] for each in records(run)] == [1, 2, 3, 4, 5, 6, 8]


MUST_STAY = {
    "--model.layers 3": "the model Shape(layers=2",
    "--optimizer.name lamb": "optimizer.name adamw, and this is lamb;",
    "--phases.1.name other": "the phases ['short', 'long'], and this is ['short', 'other'];",
    "--phases.0.batch 48": "phases.0.batch 24, and this is 48;",
    "--phases.0.length 64": "phases.0.length 32, and this is 64;",
    "--seed 2": f"seed {SEED}, and this is 2;",
}


def test_what_must_stay_is_refused(place: Place, launch: Launch, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 3)
    there = {path: contents(path) for path in finished(run)}
    for words, message in MUST_STAY.items():
        refused = launch(place.command("run", *words.split()), ranks=1)
        assert_ended(refused, 2, "error: ", f"error: --run {run}: was trained with {message}")
    assert {path: contents(path) for path in finished(run)} == there


def test_between_phases_more_may_change(place: Place, launch: Launch, straight: Path) -> None:
    stopped_at(straight, place.folder / "run", 5)
    done = launch(place.command("run", "--seed", 2, "--phases.1.batch", 24, "--phases.0.batch", 48)).wait()
    assert [(each.code, each.errors) for each in done] == [(0, "")] * 2
    for change in (f"seed {SEED} -> 2", "phases.1.batch 12 -> 24", "phases.0.batch 24 -> 48"):
        assert f"changed since then: {change}\n" in done[0].output


# Signals and limits.


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), slow(signal.SIGUSR1, 0)])
def test_a_signal_to_one_rank_stops_all_in_good_order(
    place: Place, launch: Launch, long: Path, number: int, rank: int
) -> None:
    going = launch(place.command("run", *LONG))
    going.reach(3)
    going.signal(number, rank)
    errors = assert_ended(going, Code.STOPPED)
    assert errors == (
        f"stopped by a signal after step {going.step}, and saved; the same command continues from there\n"
    )
    assert finished(place.folder / "run")[-1].name == f"step-{going.step:08}"
    done = launch(place.command("run", *LONG)).wait()
    assert [(each.code, each.errors) for each in done] == [(0, "")] * 2
    assert f"continues after step {going.step}\n" in done[0].output
    assert_same(place.folder / "run", long)


def test_more_signals_during_the_save_change_nothing(place: Place, launch: Launch, long: Path) -> None:
    command = place.command("run", *LONG, "--checkpoints.every", "0")
    going = launch(command, fault=["slow_save", 0.3])
    going.reach(3)
    going.signal(signal.SIGTERM)
    wait_for(lambda: any((place.folder / "run" / FOLDER).glob("*.tmp")))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        going.signal(number)
        time.sleep(0.05)
    assert_ended(going, Code.STOPPED, f"stopped by a signal after step {going.step}, and saved")
    assert finished(place.folder / "run")[-1].name == f"step-{going.step:08}"
    assert_ended(launch(command), 0)
    assert_same(place.folder / "run", long)


def slow_start() -> None:
    """A fault: rank 0 needs longer for its model, and the others wait for it."""
    initialize = Bert.initialize

    def slowly(self: Bert, seed: int) -> Bert:
        if os.environ["RANK"] == "0":
            time.sleep(2)
        return initialize(self, seed)

    Bert.initialize = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("begun", [1, 2])
def test_a_run_that_is_stopped_while_it_starts(place: Place, launch: Launch, straight: Path, begun: int) -> None:
    """While rank 0 waits for the others to come, at once; while they make the model, after a first step."""
    run = stopped_at(straight, place.folder / "run", 6)
    before = {path: contents(path) for path in finished(run)}
    (run / "lock").unlink()
    going = launch(place.command("run", *SAVES), fault=["slow_start"], begun=begun)
    if begun == 2:
        wait_for((run / "lock").exists)
    time.sleep(0.5)
    going.signal(signal.SIGTERM)
    message = INTERRUPTION if begun == 1 else "stopped by a signal after step 7, and saved; the same command continues"
    assert assert_ended(going, Code.STOPPED).strip().startswith(message)
    assert {path: contents(path) for path in before} == before
    assert_ended(launch(place.command("run", *SAVES)), 0)
    assert_same(run, straight)


@pytest.mark.parametrize("told", ["--time-limit", slow("Slurm")])
def test_the_time_limit(place: Place, launch: Launch, told: str) -> None:
    words = ["--time-limit", "4s"] if told == "--time-limit" else []
    variables = {} if words else {"SLURM_JOB_END_TIME": str(int(time.time()) + 5)}
    going = launch(place.command("run", *ENDLESS, *words), environment=variables)
    assert_ended(going, Code.STOPPED, "stopped by the time limit after step ", "and saved")
    assert 0 < going.step < 5000
    assert finished(place.folder / "run")[-1].name == f"step-{going.step:08}"


LIMITS = {
    "90m": 5400,
    "2h": 7200,
    "1.5h": 5400,
    "45s": 45,
    "1d": 86400,
    "30:00": 1800,
    "12:00:00": 43200,
    "1-12:00:00": 129600,
    "2-01:30": 178200,
}


@pytest.mark.parametrize("text", LIMITS)
def test_how_a_time_limit_is_written(text: str) -> None:
    assert time_limit(text, {}) == LIMITS[text]


@pytest.mark.parametrize(
    "text", ["", "90", "m", "-2h", "2 h", "2w", "1:2:3", "1-12", "tomorrow", "1e3s", "nan", "12:00h"]
)
def test_a_time_limit_that_is_not_understood(text: str) -> None:
    with pytest.raises(UserError, match=f"--time-limit {text}: not understood"):
        time_limit(text, {})


def test_the_end_of_the_slurm_job() -> None:
    for text in ("", "soon"):
        assert time_limit("auto", {"SLURM_JOB_END_TIME": text}) is None
    assert time_limit("auto", {}) is None
    limit = time_limit("auto", {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)})
    assert limit is not None
    assert limit - (time.monotonic() - control.STARTED) == pytest.approx(1000, abs=60)


# Losses and gradients.

BAD = 2
"""number of a batch, which step 3 takes"""
COLLAPSED = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


def poison(what: str, follows: str, number: int = BAD, die_at: int = 0) -> None:
    """A fault of rank 1 in the first phase, in a batch or at a step: the loss of its second micro-batch, its gradient,
    all its losses finitely, or (of all ranks) the scale. With `die_at`, the run is killed at that step."""
    train_step, forward, backward, step = Trainer.train_step, Engine.forward, Engine.backward, Engine.step
    bad, micro = False, 0

    def bad_train_step(self: Trainer, *arguments: Any) -> None:
        nonlocal bad, micro
        now = self.batch if follows == "batch" else self.progress.phase_step
        bad, micro = now == number and self.progress.phase == 0 and (self.rank == 1 or what == "collapse"), 0
        train_step(self, *arguments)
        if self.progress.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def bad_forward(self: Engine, batch: Any) -> Losses:
        nonlocal micro
        losses, micro = forward(self, batch), micro + 1
        if bad and what == "loss" and micro == 2:
            losses = losses._replace(masked=losses.masked * math.nan)
        if bad and what == "leap":
            losses = losses._replace(masked=losses.masked * 5)
        return losses

    def bad_backward(self: Engine, loss: Tensor, last: bool) -> None:
        if bad and what == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]
        backward(self, loss, last)

    def collapse() -> None:
        raise Exception(COLLAPSED)

    def bad_step(self: Engine, rate: float) -> None:
        if bad and what == "collapse":
            self.deepspeed.step = collapse
        step(self, rate)

    Trainer.train_step = bad_train_step  # type: ignore[method-assign, assignment]
    Engine.forward, Engine.backward, Engine.step = bad_forward, bad_backward, bad_step  # type: ignore[method-assign]


def without(home: Home, place: Place, name: str, batch: int, *more: object) -> Path:
    """A straight run to which a batch does not belong from the start."""
    (place.folder / name).mkdir()
    write_skips(place.folder / name, [Skip(0, batch, 1, "")])
    return train_straight(home, place, name, *more)


@pytest.fixture(scope="module")
def without_bad(home: Home, shared: Place, straight: Path) -> Path:
    run = without(home, shared, "survival without", BAD, *SAVES)
    ours, theirs = state(run), state(straight)
    assert not all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return run


def in_order(place: Place, rank: int) -> list[str]:
    """The examples of the bad batch that a rank has, as they are named, micro-batch by micro-batch."""
    dataset = Dataset(place.data, Manifest.read(place.data), 32)
    order = Order(int(fold(SEED, 0)[0]), dataset.shard_rows)
    micro = step_batches(dataset, order, BAD, 24, rank, 2, accumulation=3).micro
    return [", ".join(f"shard {shard} row {row}" for shard, row in each.examples) for each in micro]


def assert_left_out(run: Path, *wanted: tuple[int, int]) -> None:
    assert [(skip.phase, skip.first, skip.count) for skip in read_skips(run)] == [(0, *each) for each in wanted]
    assert all(isinstance(each["loss"], float) for each in records(run))


@pytest.mark.parametrize("what", ["loss", "gradient", "collapse"])
def test_a_bad_batch_is_left_out(place: Place, launch: Launch, without_bad: Path, what: str) -> None:
    """Exactly that, and for the rest the run is as if it had never been."""
    messages = {
        "loss": f"the loss is nan at step 3 on rank 1, of {in_order(place, 1)[1]}",
        "gradient": f"the norm of the gradient is inf at step 3; rank 0 had {in_order(place, 0)[0]}, … (12 examples)",
        "collapse": "gradients overflow up to step 3 with the smallest scale of the loss",
    }
    going = launch(place.command("run", *SAVES), fault=["poison", what, "batch"])
    what_then = "; the run goes back to its last checkpoint and leaves that out\n"
    errors = assert_ended(going, 0, f"warning: {messages[what]}{what_then}")
    assert errors.count("\n") == 1
    assert_left_out(place.folder / "run", (BAD, 1))
    assert read_skips(place.folder / "run")[0].reason == messages[what]
    assert_same(place.folder / "run", without_bad)


@pytest.mark.parametrize("zero", [slow(0), slow(2), slow(3)])
def test_a_bad_gradient_under_other_stages(place: Place, launch: Launch, zero: int) -> None:
    going = launch(place.command("run", *SAVES, "--parallel.zero", zero), fault=["poison", "gradient", "batch"])
    assert_ended(going, 0, "warning: the norm of the gradient is ", " at step 3; rank 0 had shard ")
    assert_left_out(place.folder / "run", (BAD, 1))
    assert [each["step"] for each in records(place.folder / "run")] == list(range(1, 9))


@pytest.mark.parametrize("more", [["--checkpoints.every", "0"], ["--resume", "never"]])
def test_a_bad_batch_before_the_first_checkpoint_and_in_a_run_that_resumes_nothing(
    place: Place, launch: Launch, without_bad: Path, more: list[str]
) -> None:
    """The run begins again, or goes back to a checkpoint of its own."""
    going = launch(place.command("run", *SAVES, *more), fault=["poison", "loss", "batch"])
    assert_ended(going, 0, "warning: the loss is nan at step 3 on rank 1")
    assert_same(place.folder / "run", without_bad)


def test_what_was_left_out_stays_so(place: Place, launch: Launch, without_bad: Path) -> None:
    """After a rollback the run is killed, and goes on without the fault."""
    going = launch(place.command("run", *SAVES), fault=["poison", "loss", "batch", BAD, 4])
    assert {each.code for each in going.wait()} <= {-signal.SIGKILL, Code.RANK_LOST}
    assert_left_out(place.folder / "run", (BAD, 1))
    assert_ended(launch(place.command("run", *SAVES)), 0)
    assert_same(place.folder / "run", without_bad)


def test_a_fault_that_follows_the_step_ends_the_run(place: Place, launch: Launch) -> None:
    run = place.folder / "run"
    going = launch(place.command("run", *SAVES), fault=["poison", "loss", "step"])
    again = "3 times before, the run has gone back to a checkpoint for such a reason (guards.rollbacks = 3)"
    errors = assert_ended(going, 2, "\nerror: the loss is nan at step 3 on rank 1", again)
    assert errors.count("warning: the loss is nan at step 3 on rank 1, of shard ") == 3
    assert_left_out(run, (BAD, 1), (BAD + 1, 1), (BAD + 2, 1))
    assert [each["step"] for each in records(run)] == [1, 2]
    assert finished(run)[-1].name == "step-00000002"


def test_a_loss_that_leaps(place: Place, home: Home, launch: Launch) -> None:
    more = [*SAVES, "--phases.0.steps", 14, "--guards.spike", 4]
    wanted = without(home, place, "without", 11, *more)
    going = launch(place.command("run", *more), fault=["poison", "leap", "batch", 11])
    assert_ended(going, 0, "warning: the loss leapt to ", " in the steps to 12; the run goes back")
    assert_left_out(place.folder / "run", (11, 1))
    assert_same(place.folder / "run", wanted)


skips = st.lists(
    st.builds(Skip, phase=st.integers(0, 1), first=st.integers(0, 40), count=st.integers(1, 6), reason=st.just(""))
)


@given(skips, st.integers(0, 1))
def test_the_batches_of_a_phase_are_those_that_are_not_left_out(skips: list[Skip], phase: int) -> None:
    out = {skip.first + index for skip in skips if skip.phase == phase for index in range(skip.count)}
    wanted = itertools.islice((number for number in itertools.count() if number not in out), 60)
    assert [batch_number(step, phase, skips) for step in range(60)] == list(wanted)


def test_a_guard_names_the_first_thing_wrong() -> None:
    good, bad = torch.tensor(5.0), torch.tensor(math.inf)
    examples = [torch.tensor([[0, 1], [0, 2]]).numpy(), torch.tensor([[3, 4], [3, 5]]).numpy()]
    guard = Guard(1, spike=2.0, scaled=False)
    guard.add(7, 17, [good, good], 1.0, examples)
    guard.add(8, 18, [good, bad], 1.0, examples)
    guard.add(9, 19, [bad, bad], math.nan, examples)
    found = guard.look()
    assert found is not None
    assert (found.step, found.batch) == (8, 18)
    assert found.text == "the loss is inf at step 8 on rank 1, of shard 3 row 4, shard 3 row 5"
    assert guard.look() is None
    guard.add(8, 18, [good, good], math.nan, examples)
    gradient = guard.look()
    assert gradient is not None
    assert first_of([gradient, None, found]) == found, "a loss says more than a gradient"
    scaled = Guard(1, spike=2.0, scaled=True)
    scaled.add(7, 17, [good, good], math.inf, examples)
    assert scaled.look() is None, "the scale is lowered for it"


def test_a_loss_leaps_above_the_median_of_many() -> None:
    guard = Guard(0, spike=2.0, scaled=False)
    assert not any(guard.leaps(loss) for loss in [9.0, 3.0] + [6.0] * 8)
    assert guard.leaps(8.01)
    assert not guard.leaps(7.99)
    never = Guard(0, spike=0.0, scaled=False)
    assert not any(never.leaps(loss) for loss in [6.0] * 20 + [1e9])


# Clocks.


def jumping_clock() -> None:
    """A fault: the time of day jumps by hours at each look, to and fro."""
    now, count = time.time, itertools.count()
    time.time = lambda: now() + 3600 * (-5, 0, 7)[next(count) % 3]


def test_a_clock_that_jumps(place: Place, launch: Launch, straight: Path) -> None:
    assert_ended(launch(place.command("run", *SAVES), fault=["jumping_clock"]), 0)
    assert_same(place.folder / "run", straight)
    for kind in ("step", "evaluation"):
        assert all(0 < each["seconds"] < 600 for each in records(place.folder / "run", kind))


def test_a_clock_that_jumps_in_a_run_by_the_clock(place: Place, launch: Launch) -> None:
    text = place.recipe.read_text().replace("steps = 5", "share = 0.5").replace("steps = 3", "share = 0.5")
    place = dataclasses.replace(place, recipe=place.folder / "clock.toml")
    place.recipe.write_text("hours = 0.001\n" + text)
    assert_ended(launch(place.command("run"), fault=["jumping_clock"]), 0)
    lines = records(place.folder / "run")
    for phase in (1, 2):
        trained = sum(each["seconds"] for each in lines if each["phase"] == phase)
        assert 1.0 < trained < 60.0  # of 1.8, and what the last step takes more
    assert all(0 <= each["seconds_left"] <= 3.6 for each in lines)


# What is kept.


def test_what_is_kept_and_what_goes(place: Place, launch: Launch, straight: Path) -> None:
    """The newest, those of some steps, and nothing that a killed run has left half done."""
    run = stopped_at(straight, place.folder / "run", 6)
    for name in ("step-00000007.tmp", "step-00000006.old"):
        (run / FOLDER / name).mkdir()
        (run / FOLDER / name / RECORD).touch()
    assert_ended(launch(place.command("run", *SAVES, "--checkpoints.keep", 2, "--checkpoints.keep-every", 3)), 0)
    names = sorted(path.name for path in (run / FOLDER).iterdir())
    assert names == [f"step-0000000{step}" for step in (3, 6, 7, 8)]
    assert_same(run, straight)


def test_a_damaged_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / FOLDER / f"step-{step:08}").mkdir(parents=True)
        (tmp_path / FOLDER / f"step-{step:08}" / RECORD).touch()
    (tmp_path / FOLDER / "step-00000002" / DAMAGED).touch()
    (tmp_path / FOLDER / "step-00000003" / RECORD).unlink()
    saving.retire(tmp_path, Checkpoints(keep=1))
    assert sorted(path.name[-1] for path in (tmp_path / FOLDER).iterdir()) == ["2", "3", "5"]


def test_a_checkpoint_that_was_being_replaced_is_put_back(straight: Path, tmp_path: Path, alone: None) -> None:
    """A run that saves a step twice, with one checkpoint kept, may be killed when that has lost its name."""
    run = stopped_at(straight, tmp_path / "run", 1)
    [only] = finished(run)
    there, old = contents(only), only.with_name(only.name + ".old")
    only.rename(old)
    (run / FOLDER / (only.name + ".tmp")).mkdir()
    assert newest_whole(run, pytest.fail) == only
    assert contents(only) == there
    old.mkdir()
    assert newest_whole(run, pytest.fail) == only
    assert old.exists(), "it is not taken for the one that has the name"
    assert read_record(only)["progress"]["step"] == 1


def test_a_new_folder_has_nothing_to_go_on_from(tmp_path: Path, alone: None) -> None:
    assert newest_whole(tmp_path, pytest.fail) is None
    (tmp_path / FOLDER / "step-00000001.tmp").mkdir(parents=True)
    assert newest_whole(tmp_path, pytest.fail) is None
    (tmp_path / SKIPPED).touch()
    with pytest.raises(UserError, match=SKIPPED):
        read_skips(tmp_path)
