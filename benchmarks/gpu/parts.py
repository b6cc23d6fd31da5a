"""The parts of `make gpu` and the figures of each to print, which parts.toml declares."""

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
    figures: dict[str, str] = Field(default_factory=dict)
    """Figures to print, in words, with the keys that lead to each in what the part has measured; `*` is the first key
    there."""

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


def format_figures(measured: Measurement) -> list[str]:
    """Formats a line for each figure. `measured` has what is known of each part."""
    lines = []
    for part in load_parts():
        found = measured.get(part.name, {}).get("measured")
        for what, keys in part.figures.items():
            value = find_figure(found, keys)
            lines.append(f"{what:56} {'-' if value is None else f'{value:,.6g}':>12}")
    return lines


def find_figure(measured: Any, keys: str) -> float | None:
    """Finds the figure that these keys lead to; None where the part has not measured it."""
    for key in keys.split("."):
        if not isinstance(measured, Mapping):
            return None
        measured = next(iter(measured.values()), None) if key == "*" else measured.get(key)
    return None if measured is None else float(measured)
