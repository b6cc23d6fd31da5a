"""The outcomes of commands: what they left in their folders, and what is known of earlier runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import Field, TypeAdapter, ValidationError

from benchmarks.measure import describe_environment, name_hardware, read_results
from benchmarks.reproduction.commands import Command, CommandKind, TableCell, order_commands
from data_prep.common.codes import ENDED, Code
from data_prep.common.errors import UserError
from data_prep.common.files import read_table
from finetuning.compare import read_results as read_task_results
from finetuning.results import RESULTS, Figures, JsonRecord, PairsResult, RunResult
from pretraining.reporting.metrics_file import METRICS, read_evaluations, read_step_records

BENCHMARK = "reproduction"
NOTES = "notes"
"""The folder of outcomes."""
Standing = Literal["done", "kept", "failed", "begun", "to do"]
SETTLED = ("done", "kept")
"""The states of commands whose outcomes are used."""
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
    """The script and its words, with names for folders."""
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


def describe_outcome(command: Command, folder: Path, code: int, said: str, seconds: float) -> CommandOutcome:
    """Describes the outcome of a command that has ended, with what it left in its folder."""
    found, scores = describe_environment(["torch"]), []
    trouble = describe_divergence(folder / METRICS) if command.kind == "train" else ""
    try:
        if command.kind == "train" or (code == 0 and command.kind in READERS):
            scores = READERS[command.kind](folder)
    except UserError as error:
        code, said = Code.CURE, join_lines(str(error))
    return CommandOutcome(
        label=command.label,
        command=" ".join(command.named_words),
        code=code,
        said=said if code else trouble,
        diverged=bool(trouble) and not code,
        seconds=round(seconds, 1),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        **{name: found[name] for name in ("commit", "hardware", "processor", "cores")},
        inputs=command.inputs,
        scores=scores,
    )


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


def describe_divergence(metrics: Path) -> str:
    """Describes a pre-training that has diverged: a loss or perplexity is no finite number, or the final loss is nearer
    to the first than to the lowest. Empty if it has not."""
    trained = [each.figures["loss"] for each in read_step_records(metrics)] if metrics.is_file() else []
    if len(trained) < 2:
        return ""
    first, last, lowest = trained[0], trained[-1], min(filter(math.isfinite, trained), default=math.nan)
    held_out = [each.figures[PERPLEXITY] for each in read_evaluations(metrics) if PERPLEXITY in each.figures]
    if all(map(math.isfinite, (first, last, *held_out))) and last < (first + lowest) / 2:
        return ""
    between = f", {lowest:.2f} at its lowest" if lowest < min(first, last) else ""
    return f"diverged: its loss was {first:.2f} at the start{between}, and is {last:.2f} at the end"


def read_training_scores(folder: Path) -> list[Score]:
    """Reads the figures of the last evaluation of a pre-training."""
    found = [*read_evaluations(folder / METRICS)] if (folder / METRICS).is_file() else []
    figures = {name: float(value) for each in found[-1:] for name, value in each.figures.items()}
    return [Score(figures={HELD_OUT: figures})]


def read_tuning_scores(folder: Path) -> list[Score]:
    """Reads the best score of each restart of a task, by the figure that selects runs."""
    [result] = read_task_results(folder).values()
    best: dict[int, RunResult] = {}
    for run in sorted(result.runs.values(), key=lambda run: (run.score is None, -(run.score or 0.0))):
        best.setdefault(int(run.settings.get("seed", 0)), run)
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


READERS: Mapping[CommandKind, Callable[[Path], list[Score]]] = {
    "train": read_training_scores,
    "tune": read_tuning_scores,
    "pairs": read_pair_scores,
}
"""Functions that read the scores of a command from its folder."""
RUNS = TypeAdapter(dict[str, CommandOutcome])
"""The outcomes in a file of results, by the names of commands."""


class Ledger:
    """The outcomes of commands, in the folder of a scale and in committed results. The name of a command is a hash of
    its words and inputs: an outcome under the same name is used, and no other."""

    def __init__(self, root: Path, results: Path, table: str) -> None:
        """`root` is the folder of the scale; `results` has committed tables, of which this table's own prevails."""
        self.root = root
        self._kept: dict[str, CommandOutcome] = {}
        self.own_runs = 0
        """The number of runs without a fault in the table's own file of results."""
        self.damaged: list[str] = []
        """A line for each file of results that cannot be read."""
        own = f"{table}-{root.name}"
        for path in sorted(results.glob(f"*-{root.name}.json"), key=lambda path: (path.stem == own, path)):
            try:
                found = read_results(path)
                runs = RUNS.validate_python(found["runs"] if found["benchmark"] == BENCHMARK else {}, strict=False)
            except (KeyError, UserError, ValidationError) as error:
                self.damaged.append(f"{path}: damaged, and passed over: {str(error).splitlines()[0]}")
                continue
            done = {name: outcome for name, outcome in runs.items() if outcome.code == 0}
            self._kept |= done
            self.own_runs = len(done) if path.stem == own else self.own_runs

    def note_path(self, command: Command) -> Path:
        """Returns the path of a command's outcome."""
        return self.root / NOTES / f"{command.name}.json"

    def find(self, command: Command) -> tuple[Standing, CommandOutcome | None]:
        """Returns the state of a command, and its outcome."""
        outcome = read_outcome(self.note_path(command))
        if outcome is not None and not outcome.is_stopped:
            return ("failed" if outcome.code else "done"), outcome
        if command.name in self._kept:
            return "kept", self._kept[command.name]
        return ("begun" if (self.root / command.name).exists() else "to do"), None

    def record(self, command: Command, code: int, said: str, seconds: float) -> CommandOutcome:
        """Records the outcome of a command that has ended, with the time of earlier starts that were stopped."""
        earlier = read_outcome(self.note_path(command))
        before = earlier.seconds if earlier is not None and earlier.is_stopped else 0.0
        outcome = describe_outcome(command, self.root / command.name, code, said, before + seconds)
        outcome.write(self.note_path(command))
        return outcome

    def list_unfinished(self, cells: Sequence[TableCell]) -> list[Command]:
        """Returns the commands to run, in order: those without an outcome, and those that they need whose results are
        missing."""
        commands, shown = order_commands(cells), {cell.command.name for cell in cells}
        wanted: set[str] = set()
        for command in reversed(commands):
            if (command.name in shown or command.kind == "train") and self.find(command)[0] not in SETTLED:
                wanted.add(command.name)
            if command.name in wanted:
                wanted |= {need.name for need in command.needs if not self._serves(need)}
        return [command for command in commands if command.name in wanted]

    def _serves(self, command: Command) -> bool:
        """Whether a command that others need is not to run again: its result exists, or it would diverge again."""
        standing, outcome = self.find(command)
        return outcome is not None and standing in SETTLED and (outcome.diverged or command.is_made(self.root))

    def median_minutes(self) -> dict[str, float]:
        """Returns the median minutes of commands on this hardware, in all tables of the scale, by label."""
        notes = map(read_outcome, (self.root / NOTES).glob("*/*.json"))
        found: dict[str, list[float]] = {}
        here = name_hardware()
        for outcome in filter(None, (*notes, *self._kept.values())):
            if outcome.code == 0 and outcome.hardware == here:
                found.setdefault(strip_seed(outcome.label), []).append(outcome.seconds / 60)
        return {label: median(minutes) for label, minutes in found.items()}


def strip_seed(label: str) -> str:
    """Removes the seed from a label."""
    return label.rpartition(" seed ")[0] or label
