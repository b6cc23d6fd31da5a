"""Training runs of seconds, for tests: a small corpus, a small recipe, and the real command."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support.processes import Done, _done, _start, _wait, free_port, spawn
from support.shards import make_shards
from torch import Tensor

from pretraining.checkpoint.record import finished_checkpoints

TIMES = {"pieces_per_second", "padded_per_second", "utilisation", "waiting", "memory", "seconds", "seconds_left"}
COMMAND = Path(__file__).parent.parent.parent / "pretraining" / "train.py"
RECIPE = """
[model]
layers = 2
hidden = 32
heads = 2
positions = 64
[precision]
dtype = "fp32"
[[phases]]
name = "short"
length = 32
batch = 24
micro_batch = 4
steps = 5
learning_rate = 2e-3
warmup = 0.25
[[phases]]
name = "long"
length = 64
batch = 12
micro_batch = 2
steps = 3
[evaluation]
every = 0
examples = 64
[checkpoints]
every = 0
[logging]
every = 1
tensorboard = false
peak_flops = 1e12
"""


@dataclass(frozen=True)
class Place:
    """What a test of runs needs."""

    data: Path
    recipe: Path
    folder: Path

    def command(self, run: str | Path, *more: object) -> list[object]:
        """A run of its own folder."""
        return ["--recipe", self.recipe, "--data", self.data, "--out", self.folder / run, *more]


def train(ranks: int, *arguments: object, timeout: float = 90.0, **more: Any) -> list[Done]:
    """The real command, as so many processes."""
    return spawn(ranks, [COMMAND, *map(str, arguments)], timeout=timeout, **more)


STOP = "--stop-at"
"""in a command for `train_all`: the step after which the run hears a signal"""


def train_all(ranks: int, commands: Sequence[Sequence[object]], timeout: float = 180.0) -> list[tuple[int, str, str]]:
    """Several runs one after another in the same processes, which saves their start: rank 0's codes and outputs."""
    given = json.dumps([[str(each) for each in command] for command in commands])
    done = spawn(ranks, run_commands, timeout=timeout, environment={"CLOZE_COMMANDS": given})
    assert all(each.code == 0 for each in done), "".join(each.output + each.errors for each in done)
    for number, (_, _, errors) in enumerate(done[-1].result):
        assert ranks == 1 or not errors, f"rank {ranks - 1} printed in run {number}: {errors}"
    for ranks_codes in zip(*([code for code, _, _ in each.result] for each in done), strict=True):
        assert len(set(ranks_codes)) == 1, f"ranks end with different codes: {ranks_codes}"
    return list(done[0].result)


def run_commands() -> list[tuple[int, str, str]]:
    """What each of the processes does: all but connecting and disconnecting is done anew for each command."""
    import torch

    from pretraining import train as entry
    from pretraining.processes.group import connect, disconnect
    from pretraining.processes.launchers import find_world

    connect(find_world(os.environ), torch.device("cpu"))
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage for each engine, and goes through all modules each time
    entry.connect = entry.disconnect = lambda *_: None
    results = []
    for command in json.loads(os.environ["CLOZE_COMMANDS"]):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), stopping(command):
            code = entry.main(command)
        results.append((code, output.getvalue(), errors.getvalue()))
    disconnect()
    return results


@contextlib.contextmanager
def stopping(command: list[str]) -> Iterator[None]:
    """Takes `STOP` out of the command, and stops the run there as a signal to its last rank would."""
    from pretraining.training.trainer import Trainer

    if STOP not in command:
        yield
        return
    place = command.index(STOP)
    last = int(command[place + 1])
    del command[place : place + 2]
    train_step = Trainer.train_step

    def step_and_signal(self: Trainer, *arguments: Any) -> None:
        train_step(self, *arguments)
        if self.progress.step == last and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    Trainer.train_step = step_and_signal  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.train_step = train_step  # type: ignore[method-assign]


@contextlib.contextmanager
def started(ranks: int, *arguments: object) -> Iterator[tuple[list[Any], Callable[[float], list[Done]]]]:
    """The processes of a run that goes on, and a function that waits for their end."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [COMMAND, *map(str, arguments)]
        processes = [_start(rank, ranks, command, Path(folder), {}, port) for rank in range(ranks)]

        def wait(seconds: float) -> list[Done]:
            assert not _wait(processes, time.monotonic() + seconds), "ranks did not end"
            return [_done(process, rank, Path(folder)) for rank, process in enumerate(processes)]

        try:
            yield processes, wait
        finally:
            _wait(processes, time.monotonic())


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def records(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: "step" or "evaluation"."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def state(run: Path) -> dict[str, Tensor]:
    """All that the last checkpoint holds."""
    return {
        f"{path.name} {name}": value
        for path in finished_checkpoints(run)[-1].glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def measured(run: Path) -> list[dict[str, Any]]:
    """The metrics, without what the clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


if __name__ == "__main__":
    print(make_shards(Path(sys.argv[1])))
