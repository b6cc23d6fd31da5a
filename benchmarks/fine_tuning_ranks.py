#!/usr/bin/env python3
"""Measures how fine-tuning scales over ranks on the CPUs of one machine: steps of SST-2, or of the demo corpus.

    python benchmarks/fine_tuning_ranks.py
    python benchmarks/fine_tuning_ranks.py --size tiny --ranks 1 2 4

Launches of 1, 2 and more ranks of one thread take turns, and one of a single rank with a thread for each. Each makes
steps of the recipe's batch, which the ranks share, and steps in which every rank has as many items. The numbers are
kept in benchmarks/results/.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.contests import Turns
from benchmarks.fine_tuners import Exercise, OurFineTuning
from benchmarks.fine_tuning import BATCHES, FILES, make_model
from benchmarks.measure import DATA, FORMAT, environment, results_file, run_command, write_results
from benchmarks.scaling import launch
from benchmarks.tables import matrix, show
from benchmarks.texts import write_demo_task
from data_prep.common.errors import UserError
from data_prep.common.launchers import find_world
from pretraining.model.shape import SIZES
from pretraining.processes.group import disconnect

EPOCHS = 4
"""Of which the first one is not counted."""
BATCH = BATCHES["sst2"]


@dataclass(frozen=True)
class RankSpeed:
    """Measures how fine-tuning scales over ranks."""

    size: str = "mini"
    """Size of the model, whose weights are fresh."""
    ranks: tuple[int, ...] = (1, 2)
    """How many ranks take turns; the first is what the others are compared with."""
    steps: int = 32
    """Steps that are timed at a time."""
    rounds: int = 5
    """Launches of each number of ranks."""
    data: Path = DATA
    """Folder with glue/SST-2 and vocab.txt; without it, sentences of the demo corpus."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""
    notes: Path | None = None
    """Be a rank of a launch, and add its seconds to this file; the model lies beside it."""
    batch: int = BATCH
    """With --notes: items of a step, over all ranks."""
    threads: int = 1
    """With --notes: threads of a rank."""


def take_part(settings: RankSpeed, notes: Path) -> None:
    """Is one rank of a launch; the first one notes the seconds of a step."""
    world = find_world(os.environ)
    exercise = Exercise("sst2", notes.parent / "model", settings.data, settings.batch, settings.steps, EPOCHS)
    work = OurFineTuning(exercise, world)
    torch.set_num_threads(settings.threads)
    times = list(timed_epochs(work))
    if world.rank == 0:
        with notes.open("a") as file:
            file.write(f"{statistics.median(times) / settings.steps}\n")
    disconnect()


def timed_epochs(work: OurFineTuning) -> Iterator[float]:
    """The seconds of each epoch but the first."""
    work.train()
    for _ in range(EPOCHS - 1):
        begin = time.perf_counter()
        work.train()
        yield time.perf_counter() - begin


def measure(settings: RankSpeed, console: Console) -> None:
    """Launches ranks in turns, prints the table, and keeps it."""
    if settings.notes is not None:
        take_part(settings, settings.notes)
        return
    if settings.size not in SIZES or settings.rounds < 1 or not settings.ranks or min(settings.ranks) < 1:
        raise UserError(f"--size: of {', '.join(SIZES)}; --ranks and --rounds from 1 on")
    most = max(settings.ranks)
    launches = {f"{ranks} x 1": (ranks, 1) for ranks in settings.ranks} | {f"1 x {most}": (1, most)}
    seconds: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in launches} for kind in ("strong", "weak")}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(settings.size, settings.data, folder / "model")
        real = (settings.data / FILES["sst2"]).exists()
        data = settings.data.resolve() if real else write_demo_task(folder / "data")
        words = [f"--steps={settings.steps}", f"--data={data}", f"--notes={folder / 'notes'}"]
        for _ in range(settings.rounds):
            for name, (ranks, threads) in launches.items():
                for kind, batch in (("strong", BATCH), ("weak", BATCH * ranks)):
                    launch(ranks, [*words, f"--batch={batch}", f"--threads={threads}"], __file__)
                    seconds[kind][name].append(float((folder / "notes").read_text().split()[-1]))
    turns, counts = (
        {kind: Turns(each) for kind, each in seconds.items()},
        {name: each[0] for name, each in launches.items()},
    )
    report(settings, "sst2" if real else "demo", turns, counts, console)


def report(
    settings: RankSpeed, task: str, turns: Mapping[str, Turns], ranks: Mapping[str, int], console: Console
) -> None:
    """Prints how many times the items of the first launch the others make in a second, and keeps it."""
    base = next(iter(ranks))
    rows = [
        {
            "ranks x threads": name,
            "seconds a step": turns["strong"].of(name),
            "times": turns["strong"].ratio(base, name),
            "seconds a step of as many items a rank": turns["weak"].of(name),
            "times the items": {key: round(value * ranks[name] / ranks[base], 3) for key, value in ratio.items()},
        }
        for name in ranks
        for ratio in (turns["weak"].ratio(base, name),)
    ]
    show(console, [matrix(f"Fine-tuning {settings.size} on {task}", rows)])
    results = {"format": FORMAT, "benchmark": "fine_tuning_ranks", "environment": environment(["torch"])}
    described = {"size": settings.size, "task": task, "rows": rows}
    write_results(settings.out or results_file("fine-tuning-ranks"), {**results, **described})


if __name__ == "__main__":
    run_command(RankSpeed, measure)
