"""The parts of `make gpu` and their goals on one H200, which parts.toml declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from benchmarks.contests import OURS
from data_prep.common.errors import UserError
from data_prep.common.reading import Form, read_settings
from data_prep.common.sections import Section

SETUP, SHARDS, SMOKE = "setup", "data", "smoke"
FIRST = (SETUP, SHARDS)
"""Parts that all others need. They run once on each machine, since results may come from another one."""
Measurement = Mapping[str, Any]
Words = Annotated[tuple[str, ...], Field(strict=False)]
TINY, ROUNDS = "tiny-128-4", "10"
"""The contest of a dry run, so that all sizes are the same command; the rounds of a real one."""
DATA = Path("build/gpu-shards")
"""Shards of all parts, which are made if they are missing."""
VOCABULARY, ALIKE = 30_522, 0.1
"""The vocabulary of goals in pieces a second, and the tolerance for easier data."""


class Goal(Section):
    """A figure that a part measures, and its target."""

    what: str
    """The figure in words."""
    figure: str
    """The keys that lead to it in what the part has measured; `*` is the first key there."""
    least: float | None = None
    """The target."""
    most: float | None = None
    """The same for a figure that is better if lower. If neither is given, the figure is only printed."""
    source: str = ""
    """The source of the target."""
    length: float | None = None
    """The mean length of sequences that the goal assumes, with a vocabulary of 30,522."""

    def find(self, measured: Any) -> float | None:
        """Returns the figure; None where the part has not measured it."""
        for key in self.figure.split("."):
            if not isinstance(measured, Mapping):
                return None
            measured = next(iter(measured.values()), None) if key == "*" else measured.get(key)
        return None if measured is None else float(measured)

    @property
    def target(self) -> str:
        """The target in words."""
        if self.least is not None:
            return f">= {self.least:,.6g}"
        return "" if self.most is None else f"<= {self.most:.2g}"

    def describe_ease(self, measured: Measurement) -> str:
        """Describes data that makes the goal easier: shorter sequences, or a smaller vocabulary."""
        if self.length is None:
            return ""
        [contest] = measured["contests"].values()
        length, words = contest["mean_length"], contest["vocabulary"]
        told = [f"sequences have {length:g} pieces, not {self.length:g}"] * (length < (1 - ALIKE) * self.length)
        told += [f"the vocabulary has {words:,}, not {VOCABULARY:,}"] * (words < (1 - ALIKE) * VOCABULARY)
        return "; ".join(told)

    def judge(self, value: float | None, dry: bool) -> str:
        """Compares the figure with the target."""
        wanted = self.least if self.least is not None else self.most
        if wanted is None:
            return ""
        if dry:
            return "dry: not compared"
        if value is None:
            return "not measured"
        missing = wanted - value if self.least is not None else value - wanted
        if missing <= 0:
            return "met"
        return f"missed by {missing:.3g}" + (f" ({missing / wanted:.0%})" if wanted else "")


class GpuPart(Section):
    """A part of the measurement, in a process of its own."""

    name: str
    """Its name."""
    what: str
    """What it measures."""
    command: Words = ()
    """A script in benchmarks/ with its words, to which the file of results is added; of a contest the last words alone
    (default: gpu/basics.py with the name)."""
    dry: Words = ()
    """The same in a dry run (default: the same)."""
    contest: str = ""
    """A contest of throughput.py."""
    against: Words = ()
    """The sides of this contest besides ours."""
    minutes: float = 1.0
    """Its approximate time on one H200; it is not started if less is left."""
    needs: Words = ()
    """Packages that it needs in addition."""
    goals: Annotated[tuple[Goal, ...], Field(strict=False)] = ()
    """Figures, and what they must reach."""

    def build_command(self, out: Path, dry: bool) -> tuple[str, ...]:
        """Builds the script and its words; with `dry`, the same for a tiny model."""
        words = (self.dry if dry else ()) or self.command
        if self.contest:
            contest, rounds = (TINY, "1") if dry else (self.contest, ROUNDS)
            usual = ("--shards", str(DATA), "--rounds", rounds, "--contests", contest)
            words = ("throughput.py", *usual, "--against", *(self.against or (OURS,)), *words)
        return tuple(word.replace("{out}", str(out)) for word in words or ("gpu/basics.py", self.name))


class GpuParts(Section):
    """The content of parts.toml."""

    parts: Annotated[tuple[GpuPart, ...], Field(strict=False)]
    """All parts, the most important first."""


@cache
def load_parts() -> tuple[GpuPart, ...]:
    """Reads all parts, the most important first."""
    path = Path(__file__).with_suffix(".toml")
    return read_settings(Form(GpuParts), path, find_faults=lambda _: []).parts


def choose(parts: Sequence[GpuPart], names: Sequence[str]) -> list[GpuPart]:
    """Returns the parts with these names or prefixes of names, and FIRST; all parts if none is given."""

    def find(wanted: Collection[str]) -> list[GpuPart]:
        return [part for part in parts if any(f"{part.name}-".startswith(f"{name}-") for name in wanted)]

    if unknown := [name for name in names if not find([name])]:
        there = ", ".join(part.name for part in parts)
        raise UserError(f"{', '.join(unknown)}: no part of this name; there is {there}")
    return find((*names, *FIRST)) if names else list(parts)


def format_goals(measured: Measurement, dry: bool) -> list[str]:
    """Formats a line for each goal: target, figure, and verdict. `measured` has what is known of each part."""
    lines = [f"{'goal':48} {'wanted':>12} {'measured':>12}"]
    for part in load_parts():
        found = measured.get(part.name, {}).get("measured")
        for goal in part.goals:
            value = None if found is None else goal.find(found)
            shown = "-" if value is None else f"{value:,.6g}"
            ease = goal.describe_ease(found) if found is not None and not dry else ""
            told = "; ".join(filter(None, [goal.judge(value, dry), ease]))
            source = f"  ({goal.source})" if goal.source else ""
            lines.append(f"{goal.what:48} {goal.target:>12} {shown:>12}  {told}{source}".rstrip())
    return lines
