"""What came of a command, as its folder shows it: scores, a curve, or what went wrong; and where it was computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from pydantic import Field, ValidationError

from benchmarks.measure import describe_environment
from benchmarks.reproduction.commands import Command, CommandKind
from data_prep.common.codes import ENDED, Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from finetuning.compare import read_results
from finetuning.results import RESULTS, Figures, JsonRecord, PairsResult, RunResult
from pretraining.reporting.loss_chart import PLACES
from pretraining.reporting.metrics_file import METRICS, read_evaluations, read_step_records

HELD_OUT = "held out"
"""What a run's own text that is held out is called as a split."""
PERPLEXITY = "perplexity"
"""The figure of that text."""
PAIRS = "pairs"
"""The same of minimal pairs."""


class Score(JsonRecord):
    """The scores of one restart."""

    seed: int = 0
    """Number of the restart."""
    figures: dict[str, Figures] = Field(default_factory=dict)
    """The figures of every split."""
    errors: dict[str, Figures] = Field(default_factory=dict)
    """How far they are by the choice of the items."""
    degenerate: bool = False
    """Whether the model says the same of every item."""
    failed: str | None = None
    """Why there are no figures."""


class CommandOutcome(JsonRecord):
    """What came of a command."""

    label: str
    """What it was to make."""
    command: str
    """The command, with folders by their names."""
    code: int
    """Its exit code."""
    said: str = ""
    """What went wrong, in its own words."""
    diverged: bool = False
    """Whether a pre-training has learned nothing, so that going on is of no use."""
    seconds: float
    """How long it took."""
    date: str
    """When, where and by what it was computed: the day with its minute, …"""
    commit: str
    hardware: str
    processor: str
    cores: int
    inputs: dict[str, str] = Field(default_factory=dict)
    """Checksums of the files that it read, by their names."""
    scores: list[Score] = Field(default_factory=list)
    """What it has measured, a score for each restart."""
    curve: list[tuple[int, float]] = Field(default_factory=list)
    """Of a pre-training, the perplexity of text that is held out, by steps."""

    @property
    def is_well(self) -> bool:
        """Whether it has ended as it should, and has learned something."""
        return self.code == 0 and not self.diverged

    @property
    def is_stopped(self) -> bool:
        """Whether it has stopped before its end, from where the same command goes on."""
        return self.code in (Code.STOPPED, Code.RANK_LOST)


def read_outcome(path: Path) -> CommandOutcome | None:
    """The outcome that a file tells of; None where there is none, or it cannot be read."""
    with suppress(OSError, UserError, ValidationError):
        return CommandOutcome.model_validate(read_table(path), strict=False)
    return None


def read_ending(folder: Path, code: int, said: str, begun: float) -> tuple[int, str]:
    """How a command has ended that was begun at this time: what its folder says counts more than its code and its last
    words, since torchrun makes 1 of every code."""
    with suppress(OSError, UserError):
        if code and (folder / ENDED).stat().st_mtime >= begun:
            ended = read_table(folder / ENDED)
            code, said = int(ended.get("code") or code), str(ended.get("reason") or said)
    return code, join_lines(said)


def join_lines(said: str) -> str:
    """What a command said, without the places of a traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines)


def describe_outcome(command: Command, root: Path, code: int, said: str, seconds: float) -> CommandOutcome:
    """What came of a command that has ended in this way."""
    folder, found = root / command.name, describe_environment(["torch"])
    scores: list[Score] = []
    curve: list[tuple[int, float]] = []
    trouble = ""
    if command.kind == "train":
        curve, trouble = read_curve(folder / METRICS)
        scores = [Score(figures={HELD_OUT: read_last_figures(folder / METRICS)})]
    elif code == 0 and command.kind in READERS:
        try:
            scores = READERS[command.kind](folder)
        except UserError as error:
            code, said = Code.CURE, join_lines(str(error))
    return CommandOutcome(
        label=command.label,
        command=" ".join((command.script, *command.words)),
        code=code,
        said=said if code else trouble,
        diverged=bool(trouble) and not code,
        seconds=round(seconds, 1),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        **{name: found[name] for name in ("commit", "hardware", "processor", "cores")},
        inputs=command.inputs,
        scores=scores,
        curve=curve,
    )


def read_curve(metrics: Path) -> tuple[list[tuple[int, float]], str]:
    """The perplexities of text that is held out; and what is wrong where the run ends nearer to where it began than to
    the best that it was."""
    if not metrics.is_file():
        return [], ""
    scored = [each for each in read_evaluations(metrics) if PERPLEXITY in each.figures]
    curve = [(each.step, each.figures[PERPLEXITY]) for each in scored]
    trained = [each.figures["loss"] for each in read_step_records(metrics, PLACES)]
    if len(trained) < 2:
        return curve, ""
    first, last, lowest = trained[0], trained[-1], min(filter(math.isfinite, trained), default=math.nan)
    if all(map(math.isfinite, (first, last, *(each for _, each in curve)))) and last < (first + lowest) / 2:
        return curve, ""
    between = f", {lowest:.2f} at its lowest" if lowest < min(first, last) else ""
    return curve, f"diverged: its loss was {first:.2f} at the start{between}, and is {last:.2f} at the end"


def read_last_figures(metrics: Path) -> Figures:
    """The figures of the last validation of a run."""
    found = list(read_evaluations(metrics)) if metrics.is_file() else []
    return {name: float(value) for name, value in found[-1].figures.items()} if found else {}


def read_scores(folder: Path) -> list[Score]:
    """The scores of every restart of a task: of what it has tried, the best by the figure that runs are compared by."""
    [result] = read_results(folder).values()
    seeds: dict[int, list[RunResult]] = {}
    for run in result.runs.values():
        seeds.setdefault(int(run.settings.get("seed", 0)), []).append(run)
    best = {seed: max(runs, key=lambda run: (run.score is not None, run.score or 0.0)) for seed, runs in seeds.items()}
    return [
        Score(seed=seed, figures=run.scores, errors=run.spreads, degenerate=run.degenerate, failed=run.failed)
        for seed, run in sorted(best.items())
    ]


def read_pair_scores(folder: Path) -> list[Score]:
    """The share of minimal pairs that a model gets right, over all and by phenomenon."""
    found = PairsResult.read(folder / RESULTS)
    if found is None:
        return []
    figures = {"accuracy": found.accuracy, **{name: each.accuracy for name, each in found.phenomena.items()}}
    return [Score(figures={PAIRS: figures}, errors={PAIRS: {"accuracy": found.spread}})]


READERS: Mapping[CommandKind, Callable[[Path], list[Score]]] = {"tune": read_scores, "pairs": read_pair_scores}
"""What reads the scores of a command."""
