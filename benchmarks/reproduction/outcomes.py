"""The outcome of a command, read from its folder: scores, a curve, or an error; and where it was computed."""

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
from pretraining.reporting.figures import PLACES
from pretraining.reporting.metrics_file import METRICS, read_evaluations, read_step_records

HELD_OUT = "held out"
"""The split of a run's own held-out text."""
PERPLEXITY = "perplexity"
"""The figure of this split."""
PAIRS = "pairs"
"""The split of minimal pairs."""


class Score(JsonRecord):
    """The scores of one restart."""

    seed: int = 0
    """Number of the restart."""
    figures: dict[str, Figures] = Field(default_factory=dict)
    """The figures of every split."""
    errors: dict[str, Figures] = Field(default_factory=dict)
    """Their standard errors over items."""
    degenerate: bool = False
    """Whether the model gives all items the same answer."""
    failed: str | None = None
    """Why there are no figures."""


class CommandOutcome(JsonRecord):
    """The outcome of a command."""

    label: str
    """The label of the command."""
    command: str
    """The script and its words, with placeholders for folders."""
    code: int
    """Its exit code."""
    said: str = ""
    """The message of an error."""
    diverged: bool = False
    """Whether a pre-training has diverged, so that there is no point in continuing."""
    seconds: float
    """Seconds, of all starts together."""
    date: str
    """Day and minute of its end."""
    commit: str
    hardware: str
    processor: str
    cores: int
    inputs: dict[str, str] = Field(default_factory=dict)
    """Checksums of the files that it read, by name."""
    scores: list[Score] = Field(default_factory=list)
    """A score for each restart."""
    curve: list[tuple[int, float]] = Field(default_factory=list)
    """Steps and perplexities of held-out text, for a pre-training."""

    @property
    def is_well(self) -> bool:
        """Whether it has ended well, and has not diverged."""
        return self.code == 0 and not self.diverged

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped early; the same command continues it."""
        return self.code in (Code.STOPPED, Code.RANK_LOST)


def read_outcome(path: Path) -> CommandOutcome | None:
    """Reads an outcome; None if the file is missing or damaged."""
    with suppress(OSError, UserError, ValidationError):
        return CommandOutcome.model_validate(read_table(path), strict=False)
    return None


def read_ending(folder: Path, code: int, said: str, begun: float) -> tuple[int, str]:
    """Returns the exit code and the message of a command that began at this time. Those in its folder take precedence,
    since torchrun turns every code into 1."""
    with suppress(OSError, UserError):
        if code and (folder / ENDED).stat().st_mtime >= begun:
            ended = read_table(folder / ENDED)
            code, said = int(ended.get("code") or code), str(ended.get("reason") or said)
    return code, join_lines(said)


def join_lines(said: str) -> str:
    """Joins the lines of a message; of a traceback, takes the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "; ".join(lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines)


def describe_outcome(command: Command, root: Path, code: int, said: str, seconds: float) -> CommandOutcome:
    """Describes the outcome of a command that has ended."""
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
    """Reads the perplexities of held-out text. Also returns a message if the final loss is nearer to the first than to
    the lowest."""
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
    """Reads the figures of the last evaluation of a run."""
    found = list(read_evaluations(metrics)) if metrics.is_file() else []
    return {name: float(value) for name, value in found[-1].figures.items()} if found else {}


def read_scores(folder: Path) -> list[Score]:
    """Reads the best score of each restart of a task, by the figure that selects runs."""
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
    """Reads the accuracy on minimal pairs, overall and by phenomenon."""
    found = PairsResult.read(folder / RESULTS)
    if found is None:
        return []
    figures = {"accuracy": found.accuracy, **{name: each.accuracy for name, each in found.phenomena.items()}}
    return [Score(figures={PAIRS: figures}, errors={PAIRS: {"accuracy": found.spread}})]


READERS: Mapping[CommandKind, Callable[[Path], list[Score]]] = {"tune": read_scores, "pairs": read_pair_scores}
"""Functions that read the scores of a command."""
