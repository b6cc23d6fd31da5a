"""What is there already of the commands of a table: done here, kept in committed results, begun, or still to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.measure import hardware_kind, read_results
from benchmarks.reproduction.declaration import Column, Declared
from benchmarks.reproduction.outcomes import (
    Outcome,
    as_outcome,
    identity_of,
    is_made,
    read_outcome,
    sources_of,
)
from benchmarks.reproduction.steps import Cell, Step, in_order
from data_prep.common.errors import UserError
from finetuning.files.splits import find_task
from finetuning.session.flags import find_data

BENCHMARK = "reproduction"
NOTES = "notes"
Standing = Literal["done", "kept", "failed", "begun", "to do"]
"""Done here; kept in a file of results; failed; begun; or still to do."""


class Minutes(NamedTuple):
    """How long a command takes, and how that is known."""

    minutes: float | None
    source: str


class Ledger:
    """The outcomes of the commands of a table, here and in committed results."""

    def __init__(self, declared: Declared, root: Path, results: Path) -> None:
        """`root` is the folder of the scale, `results` that of committed results, which other tables have too."""
        self._declared, self._root = declared, root
        self._kept: dict[str, tuple[str, Outcome]] = {}
        for path in sorted(results.glob(f"*-{declared.scale_name}.json")):
            found = read_results(path)
            if found["benchmark"] == BENCHMARK:
                self._kept |= {name: (path.name, as_outcome(each)) for name, each in found["runs"].items()}

    def note(self, step: Step) -> Path:
        """The file that tells of a command."""
        return self._root / NOTES / f"{step.name}.json"

    def find(self, step: Step) -> tuple[Standing, Outcome | None]:
        """Where a command stands, and what came of it as far as that may be used: what was made from other data, or
        from another model, than is here may not."""
        here = read_outcome(self.note(step))
        if here is not None and not here.is_stopped and not self._other(step, here):
            return ("done" if here.is_well or here.diverged else "failed"), here
        if step.name in self._kept and not self._other(step, self._kept[step.name][1]):
            return "kept", self._kept[step.name][1]
        return ("begun" if (self._root / step.name).exists() else "to do"), None

    def _other(self, step: Step, outcome: Outcome) -> list[str]:
        """What an outcome was made from that is here another one."""
        here = {need.name: identity_of(need, self._root) for need in step.needs}
        return [
            name for name, identity in here.items() if identity and outcome.made_from.get(name, identity) != identity
        ]

    def remarks(self, steps: Iterable[Step]) -> list[str]:
        """What is to be said of outcomes that are used, or are not."""
        said = []
        for step in steps:
            outcomes = [("the note here", read_outcome(self.note(step)))]
            if step.name in self._kept:
                outcomes.append(self._kept[step.name])
            for place, outcome in outcomes:
                if outcome is not None and (other := self._other(step, outcome)):
                    said.append(f"{step.name}: {place} is not used: it was made from another {', '.join(other)}")
        commits: dict[str, int] = {}
        for step in steps:
            outcome = self.find(step)[1]
            if outcome is not None and outcome.sources != sources_of(step.kind):
                commits[outcome.commit] = commits.get(outcome.commit, 0) + 1
        if commits:
            told = ", ".join(f"{count} at commit {commit or 'unknown'}" for commit, count in commits.items())
            said.append(f"results of other code than today's are used: {told}; where that matters, remove {self._root}")
        return said

    def to_do(self, cells: Sequence[Cell]) -> list[Step]:
        """The commands that are to run, none before what it needs: those without an outcome, and what they are made
        from where that is not here."""
        wanted = set()
        steps = in_order(cells)
        shown = {cell.step.name for cell in cells} | {step.name for step in steps if step.kind == "train"}
        for step in reversed(steps):
            standing, outcome = self.find(step)
            missing = outcome is None or standing == "failed"
            if step.name in wanted:  # another needs what it makes
                if outcome is not None and (outcome.diverged or (outcome.is_well and is_made(step, self._root))):
                    wanted.discard(step.name)
            elif step.name in shown and missing:
                wanted.add(step.name)
            if step.name in wanted:
                wanted |= {need.name for need in step.needs}
        return [step for step in steps if step.name in wanted]

    def minutes(self, step: Step) -> Minutes:
        """How long a command takes: as one of its kind took here, or as the scale says."""
        alike = [outcome for name, outcome in self._outcomes() if outcome.code == 0 and plain(outcome) == plain(step)]
        own = [outcome.seconds for outcome in alike if outcome.hardware == hardware_kind()]
        if own:
            return Minutes(median(own) / 60, "measured")
        key = step.column if step.kind in ("tune", "pairs") else step.kind
        said = self._declared.scale.minutes.get(key)
        return Minutes(said, "unknown" if said is None else "as the scale says")

    def _outcomes(self) -> list[tuple[str, Outcome]]:
        """All outcomes of the scale, of other tables too."""
        notes = (read_outcome(path) for path in (self._root / NOTES).glob("*/*.json"))
        return [("", each) for each in notes if each] + list(self._kept.values())


def plain(made: Step | Outcome) -> str:
    """What a command makes, whatever the seed: runs of the same name take about the same time."""
    return made.label.rpartition(" seed ")[0] or made.label


def missing(column: Column) -> str:
    """What is missing of the data of a column, with the cure; nothing where it is there."""
    try:
        if column.entry == "glue":
            find_task(find_data(None, "glue"), column.task)
        for pattern in column.files:
            folder, _, name = pattern.partition("/")
            found = find_data(None, folder, column.cure)
            if not any(found.glob(name)):
                return f"{found}: no {name}; {column.cure}"
    except UserError as error:
        return str(error).removeprefix("--data: ")
    return ""
