#!/usr/bin/env python3
"""Measures pre-training steps: sequences and real pieces a second, the share of the machine's peak, and the peer.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --contests base-128-32 --rounds 5 --profile build/profile
    python benchmarks/throughput.py --contests large-128-auto --against "cloze, LAMB"
    python benchmarks/throughput.py --contests modern:mini-128-64 --against transformers "cloze, bert"

All sides train on the same batches with real lengths: of --shards, of the text in the folder that CLOZE_DATA names, or
of the built-in corpus. They compute in the device's fast type of numbers, with dropout and AdamW, in a process each.
transformers, if it is installed, runs as its users run it: autocast over fp32 weights, the fused optimizer, batches
that are padded and pinned before the step; on a CPU also in a process that keeps freed memory as ours does, to show the
effect of that alone. Steps alternate, but on a GPU a contest with transformers, or with as many sequences as fit, runs
one side after another, ours again at the end: they do not fit in memory together. Ratios are medians. The ceilings, the
speed of matrix products and of memory, are measured too. A contest that does not fit into memory is halved. Results go
to benchmarks/results/, a file for each kind of hardware; contests of other architectures than BERT have another file,
architectures-HARDWARE.json.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from data_prep.common.beginning import begin

    begin()

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from rich.console import Console

from benchmarks.contests import OURS, Turns, alternate, spread
from benchmarks.measure import ResultsFile, describe_run, run_command
from benchmarks.peer import find_missing_packages
from benchmarks.sides import NoMemoryError, Side, SideSpec, open_sides, share_process
from benchmarks.tables import show_contest
from benchmarks.texts import find_shards
from benchmarks.training_sides import AUTO, Contest, OurTraining, TheirTraining
from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from data_prep.common.progress import StepProgress
from data_prep.shards import Manifest
from pretraining.architectures.declaration import architectures
from pretraining.config.settings import Compute, Optimizer
from pretraining.engine.deepspeed_config import EngineSettings
from pretraining.engine.precision import choose_dtype, name_dtype
from pretraining.model.batch import PretrainingBatch
from pretraining.model.shape import ARCHITECTURE, Shape
from pretraining.objectives.declaration import count_computed_flops, count_step_flops, find_objective
from pretraining.planning.amount import most_predictions
from pretraining.processes.group import choose_device
from pretraining.reporting.hardware import measure_flops, measure_memory_bandwidth

WARM_UP = 5
"""Steps that do not count: the first ones allocate memory and compile code for new numbers of rows."""
EACH = 5
"""Rounds after which the ceiling is measured once more, which takes as long as some steps."""
ON_CPU = ("mini-128-64", "base-128-32", "mini-512-16", "base-512-4")
ON_GPU = ("base-128-512", "large-128-256", "base-512-128", "large-512-64")
AGAIN = "cloze, again"
"""Our side once more after all others that ran apart: shows how the device itself has changed meanwhile."""
MASKED = [name for name, kind in architectures().items() if "both" in kind.sees]
"""Architectures that can learn as BERT does, so that they can stand beside it."""
MOST_SEQUENCES = 4096
"""Sequences of a step whose largest part that fits is taken, in contests with as many as fit."""


def build_our_side(**sections: Any) -> SideSpec:
    """Builds our side with sections of a recipe."""
    return SideSpec(partial(OurTraining, settings=EngineSettings(**sections)))


def choose_graphs(choice: str) -> Compute:
    """Chooses whether the optimizer's step is a CUDA graph, where the recipe knows the setting."""
    return Compute.model_validate({"graphs": choice} if "graphs" in Compute.model_fields else {})


SIDES = {
    OURS: SideSpec(OurTraining),
    "cloze, deterministic": build_our_side(compute=Compute(deterministic=True)),
    "cloze, own attention": build_our_side(compute=Compute(attention="own")),
    "cloze, no graphs": build_our_side(compute=choose_graphs("off")),
    "cloze, LAMB": build_our_side(optimizer=Optimizer(name="lamb")),
    "cloze, Muon": build_our_side(optimizer=Optimizer(name="muon")),
    **{f"cloze, {name}": SideSpec(partial(OurTraining, other=name)) for name in MASKED},
    "transformers": SideSpec(TheirTraining, prepared=False),
    "transformers, compiled": SideSpec(partial(TheirTraining, compiled=True), prepared=False),
    "transformers, memory kept": SideSpec(TheirTraining),
}
THEIRS = {name for name in SIDES if not name.startswith(OURS)}


@dataclass(frozen=True)
class Throughput:
    """Measures pre-training steps of Cloze and of transformers on the same batches."""

    shards: Path | None = None
    """Folder of shards with lengths 128 and 512 (default: made of text in CLOZE_DATA, or of the built-in corpus)."""
    contests: tuple[str, ...] = ()
    """[ARCHITECTURE:]SIZE-LENGTH-SEQUENCES each, or -auto for as many sequences as fit (default: by device)."""
    against: tuple[str, ...] = ()
    """Other sides, such as "cloze, LAMB", or "cloze, bert" for BERT of the same layers and width; cloze: none
    (default: transformers, if it is installed)."""
    rounds: int = 3
    """Alternating steps of which the median is taken."""
    profile: Path | None = None
    """Folder for a trace and a table of the operations of our step in each contest."""
    out: Path | None = None
    """File for the numbers (default: in benchmarks/results)."""


@dataclass(frozen=True)
class Bench:
    """What all contests have in common."""

    settings: Throughput
    shards: Path
    device: torch.device
    dtype: torch.dtype
    sides: tuple[str, ...]
    console: Console

    def runs_apart(self, contest: Contest) -> bool:
        """Whether the sides of a contest run one after another, since they do not fit in memory together."""
        return self.device.type == "cuda" and (contest.sequences == AUTO or not {*self.sides}.isdisjoint(THEIRS))


def choose_sides(settings: Throughput, device: torch.device, console: Console) -> tuple[str, ...]:
    """Chooses the sides, ours first. Kept memory concerns CPUs alone: on a GPU, PyTorch keeps it for all."""
    unknown = [name for name in settings.against if name not in SIDES]
    if unknown:
        raise UserError(f"--against {unknown[0]}: is none of {', '.join(map(repr, SIDES))}")
    peers: tuple[str, ...] = ("transformers", "transformers, memory kept")[: 2 if device.type == "cpu" else 1]
    if not settings.against and find_missing_packages("transformers"):
        console.print("transformers is not installed, so nobody trains beside us (pip install transformers)")
        peers = ()
    return tuple(dict.fromkeys((OURS, *(settings.against or peers))))


Keep = Callable[[dict[str, Any]], object]
"""Keeps what a contest has measured so far, so that a side that fails loses nothing of those before it."""


def run_contest(contest: Contest, bench: Bench, apart: bool, keep: Keep) -> dict[str, Any]:
    """Lets all sides make steps on the same batches: in turns, or `apart`, one side after another."""
    kinds = {name: SIDES[name] for name in bench.sides}
    groups = [kinds]
    if apart:
        groups = [{name: kind} for name, kind in (kinds | {AGAIN: kinds[OURS]}).items()]
    run = ContestRun(contest, bench, apart)
    for group in groups:
        run.measure(group)
        keep(run.describe())
    return run.describe()


class ContestRun:
    """The steps of sides on the batches of a contest."""

    def __init__(self, contest: Contest, bench: Bench, apart: bool) -> None:
        self._contest, self._bench, self._apart = contest, bench, apart
        self._shape, read = contest.open(bench.shards)
        self._batches = [*map(read, range(WARM_UP + bench.settings.rounds))]
        self._seconds: dict[str, Sequence[float]] = {}
        self._models: dict[str, tuple[Shape, dict[str, float]]] = {}
        """The shape of each side's model, and what it has said of its process and its GPU."""
        self._ceilings: list[float] = []
        self._kernels: list[dict[str, Any]] = []
        pieces, hidden, inner = len(self._batches[0].pieces), self._shape.hidden, self._shape.intermediate
        self._products = [(pieces, *each) for each in ((hidden, 3 * hidden), (hidden, inner), (inner, hidden))]
        """The products of a layer in a step."""

    def measure(self, kinds: Mapping[str, SideSpec]) -> None:
        """Lets these sides, which hold their memory at the same time, make their steps in turns."""
        bench, first = self._bench, next(iter(kinds))
        bench.console.print(f"{self._contest}: {', '.join(kinds)} {'are' if len(kinds) > 1 else 'is'} loading")
        with open_sides(kinds, self._shape, bench.device, bench.dtype) as sides:
            progress = StepProgress(bench.console, str(self._contest), "", len(sides) * len(self._batches), 0)

            def take_turn(side: Side, coming: Iterator[tuple[int, PretrainingBatch]]) -> float:
                number, batch = next(coming)
                if side.name == first and number % EACH == 0:
                    self._ceilings.append(measure_flops(bench.device, bench.dtype, products=self._products))
                seconds = float(side.ask("step", batch))
                progress.advance(1)
                return seconds

            turns = {name: partial(take_turn, side, enumerate(self._batches)) for name, side in sides.items()}
            with progress.show():
                self._seconds |= alternate(turns, bench.settings.rounds, WARM_UP).seconds
            for name, side in sides.items():
                shape, found = side.ask("describe")
                if share_process() and len(sides) > 1:  # it is that of all of them
                    del found["peak_memory_gib"]
                self._models[name] = shape, found
            if bench.settings.profile is not None and OURS in sides:
                self._kernels = sides[OURS].ask("write_profile", bench.settings.profile / str(self._contest))

    def describe(self) -> dict[str, Any]:
        """Returns the results of all sides so far."""
        ceiling, sides = median(self._ceilings), {}
        for name, (shape, found) in self._models.items():
            sides[name] = {**summarise(shape, self._batches[WARM_UP:], self._seconds[name], ceiling), **found}
        return {
            "sequences": self._contest.sequences,
            "matrix_gflops": round(ceiling / 1e9),
            "mean_length": round(fmean(each for batch in self._batches for each in batch.lengths), 1),
            "apart": self._apart,
            "sides": sides,
            "times_as_fast_as": Turns(self._seconds).compute_ratios(),
            **({"kernels": self._kernels} if self._kernels else {}),
        }


def fit_sequences(contest: Contest, bench: Bench) -> Contest:
    """Returns the contest with the sequences that a trainer takes for micro_batch = "auto"."""
    shape, read = replace(contest, sequences=1).open(bench.shards)
    predictions = most_predictions(find_objective(shape), contest.length, Manifest.read(bench.shards))
    with open_sides({OURS: SIDES[OURS]}, shape, bench.device, bench.dtype) as sides:
        sides[OURS].ask("step", read(0))  # allocates the state of the optimizer
        found = replace(contest, sequences=sides[OURS].ask("largest", contest.length, predictions, MOST_SEQUENCES))
    bench.console.print(f"{contest}: {found.sequences} sequences fit")
    return found


def summarise(
    shape: Shape, batches: Sequence[PretrainingBatch], seconds: Sequence[float], ceiling: float
) -> dict[str, dict[str, float]]:
    """Summarises the steps of a side."""
    steps = list(zip(batches, seconds, strict=True))
    flops = [count_step_flops(shape, batch.lengths, len(batch.labels)) / taken for batch, taken in steps]
    computed = [count_computed_flops(shape, batch.lengths, len(batch.labels)) / taken for batch, taken in steps]
    return {
        "sequences_per_second": spread([len(batch.lengths) / taken for batch, taken in steps], 2),
        "real_pieces_per_second": spread([len(batch.pieces) / taken for batch, taken in steps], 0),
        "share_of_ceiling": spread([each / ceiling for each in flops]),
        "share_of_ceiling_computed": spread([each / ceiling for each in computed]),
        "seconds_a_step": spread(seconds, 4),
    }


def run_smaller(contest: Contest, bench: Bench, keep: Keep) -> dict[str, Any]:
    """Runs a contest, and halves its sequences while a side has too little memory."""
    apart = bench.runs_apart(contest)
    if contest.sequences == AUTO:
        contest = fit_sequences(contest, bench)
    while True:
        try:
            return run_contest(contest, bench, apart, keep)
        except NoMemoryError as error:
            bench.console.print(f"{contest}: {error}; with half the sequences")
            contest = contest.halved()


def measure(settings: Throughput, console: Console) -> None:
    """Measures the ceilings, then runs the contests, and writes the results after each, since they take minutes."""
    device = choose_device("auto", World())
    given = [Contest.parse(each) for each in settings.contests or (ON_GPU if device.type == "cuda" else ON_CPU)]
    names = [contest.name for contest in given]
    if len({*names}) < len(names):
        twice = max(names, key=names.count)
        raise UserError(f"--contests: {twice} is given twice; take a command each, with another file as --out")
    if settings.rounds < 1:
        raise UserError(f"--rounds {settings.rounds}: at least 1")
    dtype = choose_dtype("auto", device)
    sides = choose_sides(settings, device, console)
    shards = find_shards(settings.shards, console.print)
    vocabulary = Manifest.read(shards).vocabulary_size
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    matrix, memory = measure_flops(device, dtype), measure_memory_bandwidth(device)
    console.print(
        f"{device.type} ({where}), {name_dtype(dtype)}: matrix products {matrix / 1e9:,.0f} GFLOP/s, "
        f"memory {memory / 1e9:,.1f} GB/s"
    )
    bench = Bench(settings, shards, device, dtype, sides, console)
    benchmark = "throughput" if all(each.architecture == ARCHITECTURE for each in given) else "architectures"
    keeper = ResultsFile(benchmark, ("torch", "deepspeed", "transformers"), settings.out)
    kept = keeper.earlier.get("contests", {})
    ceilings = {"dtype": name_dtype(dtype), "matrix_gflops": round(matrix / 1e9), "memory_gb": round(memory / 1e9, 1)}
    about = {"dtype": name_dtype(dtype), "vocabulary": vocabulary, **describe_run()}

    def keep(name: str, found: dict[str, Any]) -> Path:
        kept[name] = found | about
        return keeper.keep({"threads": torch.get_num_threads(), "ceilings": ceilings, "contests": kept})

    for contest in given:
        is_new = contest.name not in kept  # else the earlier results stay until all sides are measured anew
        found = run_smaller(contest, bench, partial(keep, contest.name) if is_new else lambda _: None)
        show_contest(console, str(replace(contest, sequences=found["sequences"])), found)
        written = keep(contest.name, found)
    console.print(f"kept in {written}")


if __name__ == "__main__":
    run_command(Throughput, measure)
