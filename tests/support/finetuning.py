"""Fine-tuning runs of seconds, for tests: a small model, a small task, the real commands, and their faults."""

import importlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

from support.base_models import write_bert
from support.faults import replace as put
from support.processes import Done, Run, start
from support.tasks import VOCABULARY
from support.training import TIMES

from finetuning.running import loop
from finetuning.running.outputs import compute_outputs
from finetuning.session import report, session
from pretraining.engine.step import train_step
from pretraining.processes import stopping

STEPS = 10
"""Steps of a run: two epochs of five."""
RECIPE = """
epochs = 2.0
batch = 8
learning_rate = 3e-3
length = 48
[precision]
dtype = "fp32"
[search]
jobs = 1
[logging]
every = 3
tensorboard = false
"""
"""Lines of the log fall between the ends of epochs."""
TASK = """
name = "toy"
kind = "classes"
train = "train.tsv"
dev = "dev.tsv"
test = "test.tsv"
"""
WORDS = {"good": "good fine great".split(), "bad": "bad poor awful".split()}


Files = Mapping[str, str | bytes]
"""Contents by the names of files."""


@dataclass(frozen=True)
class Toy:
    """What a test of fine-tuning needs."""

    model: Path
    data: Path
    """the folder with the task's files"""
    folder: Path
    """where results go"""

    def command(self, out: str | Path, *more: object, data: Path | None = None) -> list[str]:
        """The words of the command that fine-tunes for the toy task, into a folder of its own."""
        data = data or self.data
        own = ["--model", self.model, "--recipe", data / "recipe.toml", "--out", self.folder / out]
        return [str(word) for word in [data / "toy.toml", *own, *more]]


def write_toy(folder: Path) -> Toy:
    """A model, a task of two classes that a word decides, and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "toy.toml").write_text(TASK)
    draw = random.Random(1)
    for name, count in (("train", 40), ("dev", 24)):
        write_rows(folder / f"{name}.tsv", sentences(draw, count))
    texts = [text for text, _ in sentences(draw, 6)]
    (folder / "test.tsv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    return Toy(write_bert(folder / "model", VOCABULARY), folder, folder)


def sentences(draw: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Rows of the task, some of them mistaken: no model is right on all."""
    for _ in range(count):
        label = draw.choice(list(WORDS))
        words = [draw.choice(WORDS[label]), *draw.choices("film plot a the".split(), k=draw.randint(1, 6))]
        draw.shuffle(words)
        yield " ".join(words), label if draw.random() < 0.9 else draw.choice(list(WORDS))


def write_rows(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    """A file of texts with their classes."""
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))


def read_column(path: Path, number: int) -> list[str]:
    """A column of a file, without its name."""
    return [line.split("\t")[number] for line in path.read_text().splitlines()[1:]]


def changed(toy: Toy, folder: Path, files: Files) -> Path:
    """A copy of the task with other files."""
    folder.mkdir(exist_ok=True)
    for name in ("recipe.toml", "toy.toml", "train.tsv", "dev.tsv", "test.tsv"):
        shutil.copy(toy.data / name, folder / name)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_task(toy: Toy, folder: Path) -> Path:
    """Writes a task whose classes a word decides, in the pieces of the tests' shards."""
    others = "the of and water long little people time".split()
    starts = [f"{others[n % 8]} {others[n % 5]}" for n in range(24)]
    rows = "".join(f"{start} river\twet\n{start} mountain\tdry\n" for start in starts)
    return changed(toy, folder, dict.fromkeys(["train.tsv", "dev.tsv"], f"text\tlabel\n{rows}"))


# Commands.


def be_entry(command: Sequence[str], fault: Callable[[], None] | None = None) -> None:
    """What a rank does: run_task.py, with a fault."""
    from data_prep.common.supervision import exit_now

    if fault is not None:
        fault()
    exit_now(call("run_task", command))


def call(entry: str, command: Sequence[str], charts: bool = False) -> int:
    """Runs an entry in this process, `run_task` or another; returns its exit code. Without `charts`, which take most of
    the time of a small run."""
    module = importlib.import_module(f"finetuning.{entry}")
    kind = getattr(module, "".join(part.capitalize() for part in entry.split("_")))
    with nullcontext() if charts else mock.patch.object(report, "draw_task", return_value=[]):
        return session.main(kind, list(command), f"{entry}.py")


Tune = Callable[..., str]
"""What `tune` of conftest.py is: `call` that returns what is printed."""


def launch(command: Sequence[str], ranks: int = 1, fault: Callable[[], None] | None = None) -> Run:
    """Starts the real command, and lets it go on."""
    return start(ranks, be_entry, command, fault)


def fine_tune(command: Sequence[str], ranks: int = 1) -> list[Done]:
    """The real command, from its beginning to its end."""
    return launch(command, ranks).wait(120)


# What a command leaves.


def results(out: Path) -> dict[str, Any]:
    """The results of the toy task."""
    found: dict[str, Any] = json.loads((out / "toy" / "results.json").read_text())
    return found


SKIPPED = ("lock", "ended.json", "README.md")
"""files of a run that depend on the clock or on the launcher"""


def outcome(out: Path) -> dict[str, Any]:
    """The files that a command leaves, by name, without charts and without what depends on clock or launcher."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.name == "metrics.jsonl":
            found[name] = metrics(path)
        elif path.name == "results.json":
            found[name] = timeless(json.loads(path.read_text()))
        elif (
            path.is_file()
            and path.name not in SKIPPED
            and path.suffix != ".png"
            and not path.name.startswith("events.")
        ):
            found[name] = path.read_bytes()
    return found


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what the clock says."""
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()]


def timeless(figures: Any) -> Any:
    """Figures without those of the clock."""
    if not isinstance(figures, dict):
        return figures
    kept = figures.keys() - {*TIMES, "seconds", "items_per_second"}
    return {name: timeless(value) for name, value in figures.items() if name in kept}


# Faults.


def stop_at(step: int, number: int = signal.SIGTERM) -> None:
    """A fault: after this step, the last rank hears a signal."""
    make_step = loop.Tuner.step

    def step_and_signal(run: loop.Tuner, *arguments: Any) -> None:
        make_step(run, *arguments)
        if run.state.step == step and _is_last(run):
            os.kill(os.getpid(), number)

    put(loop.Tuner, "step", step_and_signal)


def stop_within_step(step: int) -> None:
    """A fault: in this step, the last rank hears a signal between its first micro-batch and its second."""
    stopping.QUESTION_SECONDS = 0.0
    calls, step_on = [0], cast(Callable[..., Any], train_step)

    def step_and_signal(*arguments: Any) -> Any:
        *others, gives_up = arguments
        calls[0] += 1

        def heard() -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return bool(gives_up())

        return step_on(*others, heard if calls[0] == step else gives_up)

    put(loop, "train_step", step_and_signal)


def stop_within_scoring(step: int, split: str) -> None:
    """A fault: when dev is scored or test is predicted after this step, the last rank hears a signal before it."""
    stopping.QUESTION_SECONDS = 0.0
    score = loop.Tuner.score_where_due
    under_way: list[loop.Tuner] = []

    def noted(run: loop.Tuner) -> None:
        under_way[:] = [run]
        score(run)

    def heard(engine: Any, kind: Any, splits: Any, context: Any) -> Any:
        if under_way[0].state.step == step and split in splits and _is_last(under_way[0]):
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_outputs(engine, kind, splits, context)

    put(loop.Tuner, "score_where_due", noted)
    put(loop, "compute_outputs", heard)


def kill_at(step: int, run: str = "") -> None:
    """A fault: after this step of a run whose name has `run` in it, the process is killed."""
    after_step = loop.Tuner.after_step

    def after_step_or_die(self: loop.Tuner) -> None:
        after_step(self)
        if self.state.step == step and run in self.run.folder.name:
            os.kill(os.getpid(), signal.SIGKILL)

    put(loop.Tuner, "after_step", after_step_or_die)


def slow_steps(seconds: float) -> None:
    """A fault: every step takes longer, and says so when it begins."""
    make_step = loop.Tuner.step

    def slowly(run: loop.Tuner, *arguments: Any) -> None:
        print("a slow step", flush=True)
        time.sleep(seconds)
        make_step(run, *arguments)

    put(loop.Tuner, "step", slowly)


def _is_last(run: loop.Tuner) -> bool:
    return run.context.world.rank == run.context.world.size - 1
