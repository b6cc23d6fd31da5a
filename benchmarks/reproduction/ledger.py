"""Which commands of a table are done, have failed, are begun, or are still to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.measure import commit, hardware_kind
from benchmarks.reproduction.outcomes import Outcome, read_outcome
from benchmarks.reproduction.steps import Cell, Step, in_order

BENCHMARK = "reproduction"
NOTES = "notes"
Standing = Literal["done", "failed", "begun", "to do"]


class Ledger:
    """The outcomes of commands in the folder of a scale. The name of a command is a hash of its words and inputs: an
    outcome under the same name is used, and no other."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def note(self, step: Step) -> Path:
        """The file that has the outcome of a command."""
        return self._root / NOTES / f"{step.name}.json"

    def find(self, step: Step) -> tuple[Standing, Outcome | None]:
        """Where a command stands, and its outcome."""
        outcome = read_outcome(self.note(step))
        if outcome is not None and not outcome.is_stopped:
            return ("failed" if outcome.code else "done"), outcome
        return ("begun" if (self._root / step.name).exists() else "to do"), None

    def to_do(self, cells: Sequence[Cell]) -> list[Step]:
        """The commands that are to run, none before what it needs: those without an outcome, and what they are made
        from where that is not here."""
        steps = in_order(cells)
        shown = {cell.step.name for cell in cells} | {step.name for step in steps if step.kind == "train"}
        wanted = {step.name for step in steps if step.name in shown and self.find(step)[0] != "done"}
        for step in reversed(steps):
            if step.name in wanted:
                wanted |= {need.name for need in step.needs if not self._serves(need)}
        return [step for step in steps if step.name in wanted]

    def _serves(self, step: Step) -> bool:
        """Whether nothing is won by making again what others need: it is here, or a run that will diverge again."""
        standing, outcome = self.find(step)
        return outcome is not None and standing == "done" and (outcome.diverged or step.is_made(self._root))

    def remarks(self, steps: Iterable[Step]) -> list[str]:
        """Lines on outcomes that were made at another commit than this one."""
        now = commit()
        found = (self.find(step)[1] for step in steps)
        others = Counter(outcome.commit or "unknown" for outcome in found if outcome and outcome.commit != now)
        told = ", ".join(f"{count} runs at {name}" for name, count in others.items())
        return [f"made at another commit than this: {told}"] if told else []

    def minutes(self) -> dict[str, float]:
        """How long commands took on this hardware, in all tables of the scale, by what they make."""
        notes = (read_outcome(path) for path in (self._root / NOTES).glob("*/*.json"))
        found: dict[str, list[float]] = {}
        for outcome in filter(None, notes):
            if outcome.code == 0 and outcome.hardware == hardware_kind():
                found.setdefault(without_seed(outcome.label), []).append(outcome.seconds / 60)
        return {made: median(each) for made, each in found.items()}


def without_seed(label: str) -> str:
    """What a command makes, whatever the seed: runs of the same label take about the same time."""
    return label.rpartition(" seed ")[0] or label
