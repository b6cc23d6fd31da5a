"""The parts of `make gpu`: each a script of the benchmarks with its options, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.common.errors import UserError

SETUP = "setup"
FIRST = (SETUP, "data")
"""What all others need: run each time, since a results folder may have come from another machine."""
CONTESTS = ("base-128-512", "large-128-256", "base-512-128", "large-512-64")


@dataclass(frozen=True)
class Part:
    """A part of the measurement."""

    name: str
    what: str
    command: tuple[str, ...]
    """a script in benchmarks/ with its options; `--out FILE` is added, for what it measures"""


def build_parts(shards: Path, folder: Path, dry: bool) -> list[Part]:
    """All parts in their order. `dry` gives the same with a tiny model."""
    on_shards = ("--shards", str(shards))

    def contest(name: str) -> str:
        return f"tiny-{name.split('-')[1]}-4" if dry else name

    def throughput(name: str, *against: str) -> tuple[str, ...]:
        rounds = ("--rounds", "1" if dry else "10")
        return ("throughput.py", *on_shards, *rounds, "--contests", contest(name), *against)

    profile = throughput("large-128-256", "--peer", "none", "--profile", str(folder / "profile"))
    return [
        Part(SETUP, "what is installed, and on what machine", ("gpu/machine.py", *(["--dry"] if dry else []))),
        Part("data", "shards to train on", ("gpu/shards.py", *on_shards)),
        Part("tests", "the tests that need a GPU", ("gpu/device_tests.py",)),
        *(
            Part(
                f"throughput-{name.rpartition('-')[0]}",
                f"{name}, against transformers",
                throughput(name, "--peer", "transformers"),
            )
            for name in CONTESTS
        ),
        Part("profile", "which kernels take the time of a step", profile),
        Part(
            "deterministic",
            "what the same bits each time cost",
            throughput("large-128-256", "--against", "cloze, deterministic"),
        ),
    ]


def choose(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The parts of these names, or of names that begin so; all of them where none is given."""
    unknown = [name for name in names if not any(_is_named(part, name) for part in parts)]
    if unknown:
        there = ", ".join(part.name for part in parts)
        raise UserError(f"{', '.join(unknown)}: no part of this name; there is {there}")
    return [part for part in parts if not names or any(_is_named(part, name) for name in (*names, *FIRST))]


def _is_named(part: Part, name: str) -> bool:
    return part.name == name or part.name.startswith(f"{name}-")
