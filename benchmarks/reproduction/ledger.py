"""What is there already of the commands of a table: done here, kept in committed results, begun, or still to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from pydantic import ValidationError

from benchmarks.measure import hardware_kind, read_results
from benchmarks.reproduction.declaration import Declared
from benchmarks.reproduction.origins import is_made, origins_of
from benchmarks.reproduction.outcomes import Outcome, read_outcome, sources_of
from benchmarks.reproduction.results import TableResult
from benchmarks.reproduction.steps import Cell, Step, in_order
from data_prep.common.errors import UserError

BENCHMARK = "reproduction"
NOTES = "notes"
Standing = Literal["done", "kept", "failed", "begun", "to do"]
"""Done here; kept in a file of results; failed; begun; or still to do."""
ANEW = "an empty folder as --results, and another as --out, make them anew"
"""What helps against results that one does not want."""


class Kept(NamedTuple):
    """An outcome in a file of results."""

    own: bool
    """Whether the file is that of this table."""
    file: str
    outcome: Outcome


class Ledger:
    """The outcomes of the commands of a table, here and in committed results."""

    def __init__(self, declared: Declared, root: Path, results: Path) -> None:
        """`root` is the folder of the scale, `results` that of committed results, which other tables have too."""
        self._declared, self._root = declared, root
        self._kept: dict[str, list[Kept]] = {}
        self.damaged: list[str] = []
        """Lines on files of results that cannot be read."""
        for path in sorted(results.glob(f"*-{declared.scale_name}.json")):
            try:
                self._take(path)
            except (UserError, ValidationError) as error:
                self.damaged.append(f"{path}: damaged, and passed over: {str(error).splitlines()[0]}")

    def _take(self, path: Path) -> None:
        """Takes what a file of results has of commands: those of this table first, then the newest."""
        found = read_results(path)
        if found["benchmark"] != BENCHMARK:
            return
        own = path.stem == f"{self._declared.name}-{self._declared.scale_name}"
        for name, outcome in TableResult.model_validate(found, strict=False).runs.items():
            if not outcome.is_stopped:
                kept = self._kept.setdefault(name, [])
                kept.append(Kept(own, path.name, outcome))
                kept.sort(key=lambda each: (each.own, each.outcome.date), reverse=True)

    def note(self, step: Step) -> Path:
        """The file that tells of a command."""
        return self._root / NOTES / f"{step.name}.json"

    def find(self, step: Step) -> tuple[Standing, Outcome | None]:
        """Where a command stands, and what came of it as far as that may be used: what was made from other data, or
        from another model, than is here or in use may not."""
        here = read_outcome(self.note(step))
        if here is not None and not here.is_stopped and not self._other(step, here):
            return ("done" if here.is_well or here.diverged else "failed"), here
        for kept in self._kept.get(step.name, []):
            if not self._other(step, kept.outcome):
                return ("kept" if kept.outcome.is_well or kept.outcome.diverged else "failed"), kept.outcome
        return ("begun" if (self._root / step.name).exists() else "to do"), None

    def _other(self, step: Step, outcome: Outcome) -> list[str]:
        """What an outcome was made from that is another one here, or in use of what is kept; what is not known of one
        of both counts as alike."""
        now = origins_of(step, self._root)
        for need in step.needs:
            if not now[need.name] and (found := self.find(need)[1]):
                now[need.name] = found.identity
        return [
            name for name, origin in now.items() if origin and outcome.made_from.get(name, origin) not in (origin, "")
        ]

    def is_outdated(self, step: Step) -> bool:
        """Whether what a command has left here was made from something else than is here."""
        noted = read_outcome(self.note(step))
        return noted is not None and bool(self._other(step, noted))

    def remarks(self, steps: Iterable[Step]) -> list[str]:
        """What is to be said of outcomes that are used, or are not."""
        said = []
        for step in steps:
            note = read_outcome(self.note(step))
            kept = [] if self.find(step)[1] else [(each.file, each.outcome) for each in self._kept.get(step.name, [])]
            for place, outcome in (*([("the note here", note)] if note else []), *kept):
                if other := self._other(step, outcome):
                    said.append(f"{step.name}: {place} is not used: it was made from another {', '.join(other)}")
        commits: dict[str, int] = {}
        for step in steps:
            found = self.find(step)[1]
            if found is not None and found.sources != sources_of(step.kind):
                commits[found.commit] = commits.get(found.commit, 0) + 1
        if commits:
            told = ", ".join(f"{count} at commit {commit or 'unknown'}" for commit, count in commits.items())
            said.append(f"results of other code than today's are used: {told}; {ANEW}")
        return said

    def to_do(self, cells: Sequence[Cell]) -> list[Step]:
        """The commands that are to run, none before what it needs: those without an outcome, all that is made from
        these, and what they are made from where that is not here."""
        steps = in_order(cells)
        shown = {cell.step.name for cell in cells} | {step.name for step in steps if step.kind == "train"}
        anew: set[str] = set()
        for step in steps:
            lacks = step.name in shown and not self._is_settled(step)
            if lacks or any(need.name in anew for need in step.needs):
                anew.add(step.name)
        wanted = set(anew)
        for step in reversed(steps):
            if step.name in wanted:
                wanted |= {need.name for need in step.needs if not self._serves(need)}
        return [step for step in steps if step.name in wanted]

    def _is_settled(self, step: Step) -> bool:
        """Whether a command has an outcome that may be used, and has not failed."""
        standing, outcome = self.find(step)
        return outcome is not None and standing != "failed"

    def _serves(self, step: Step) -> bool:
        """Whether nothing is won by making again what others need: it is here, or a run that will diverge again."""
        outcome = self.find(step)[1]
        return outcome is not None and (outcome.diverged or (outcome.is_well and is_made(step, self._root)))

    def measured(self, step: Step) -> float | None:
        """How many minutes a command took, or one that makes the same; None where none ran on such hardware."""
        own = self._seconds_here.get(plain(step))
        return median(own) / 60 if own else None

    def said(self, step: Step) -> float | None:
        """How many minutes a command takes by the scale; None where that does not say."""
        key = step.column if step.kind in ("tune", "pairs") else step.kind
        said = self._declared.scale.minutes.get(key)
        if said is not None and step.kind == "tune":
            said *= self._declared.restarts / self._declared.scale.restarts
        return said

    @cached_property
    def _seconds_here(self) -> dict[str, list[float]]:
        """How long commands took on this hardware, of all tables of the scale, by what they make."""
        notes = (read_outcome(path) for path in (self._root / NOTES).glob("*/*.json"))
        found: dict[str, list[float]] = {}
        for outcome in (*filter(None, notes), *(each.outcome for kept in self._kept.values() for each in kept)):
            if outcome.code == 0 and outcome.hardware == hardware_kind():
                found.setdefault(plain(outcome), []).append(outcome.seconds)
        return found


def plain(made: Step | Outcome) -> str:
    """What a command makes, whatever the seed: runs of the same name take about the same time."""
    return made.label.rpartition(" seed ")[0] or made.label
