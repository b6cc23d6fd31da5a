"""Flags that all commands of fine-tuning take, and the places where they look for data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from data_prep.common.toml_text import toml_value
from finetuning.tasks.task import Setup, Task


class Suite(NamedTuple):
    """The tasks of a command."""

    name: str
    """The last part of the folder for their results."""
    recipe: str
    """The recipe where none is named."""
    small_recipe: str | None = None
    """The recipe for miniatures, if they have another."""


@dataclass(frozen=True)
class TuningFlags:
    """What all commands of fine-tuning take; every value of the recipe can be given as --section.key VALUE."""

    model: str | None = None
    """A run, a BERT folder of transformers, or a name on the Hugging Face hub (default: the newest exported model)."""
    backward: str | None = None
    """A second model, whose frozen features stand beside those of the first, layer by layer: with --features.layers mix
    and one model that sees what is before a piece, the other what is after it, ELMo's scheme."""
    out: Path | None = None
    """Where results go (default: runs/MODEL/…)."""
    recipe: str | None = None
    """TOML file that says how to train, or the name of one in finetuning/recipes (default: by task and size)."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try."""
    batch_size: int | None = None
    """Items of a step."""
    epochs: float | None = None
    """How often the training items are gone through."""
    seeds: int | None = None
    """Restarts of each, with another order of the data and another head."""
    from_scratch: bool = False
    """Begin with fresh weights of the model's sizes, to see what pre-training is worth."""
    evaluate: bool = False
    """Score a model that is fine-tuned for the task already, without training."""
    cache_gb: float | None = None
    """Keep what frozen encoders give of all items beside the results where it takes no more than this (default: 4)."""
    share: bool = False
    """Go through runs beside other commands in the same folder, and leave what follows from all of them to one without
    this flag."""
    check: bool = False
    """Print what will be done, and stop."""
    time_limit: str = "auto"
    """Save and stop ahead of this, counted from the start: 90m, 2h (default: the end of the Slurm job)."""

    def suite(self) -> Suite:
        """The tasks that the command is for, with their recipes."""
        raise NotImplementedError

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files of all tasks."""
        raise NotImplementedError

    def finish(self, out: Path, tasks: Sequence[Task], console: Console) -> None:
        """Does what is left to do when all runs of all tasks are done."""

    def overrides(self) -> list[str]:
        """The settings that the command's own flags stand for."""
        values: dict[str, Any] = {
            "search.learning_rates": list(self.learning_rates) or None,
            "batch": self.batch_size,
            "epochs": self.epochs,
            "search.seeds": self.seeds,
            "features.cache_gb": self.cache_gb,
        }
        return [f"--{name}={toml_value(value)}" for name, value in values.items() if value is not None]


def find_data(given: Path | None, name: str, cure: str = "", flag: str = "--data") -> Path:
    """The folder of data that was given, or the first of the places where data of this name may be.

    `cure` is what a user can do who has none; without it, that is to fetch it. `flag` is what gives it.
    """
    places = [Path("data") / name]
    if folder := os.environ.get("CLOZE_DATA"):
        places.append(Path(folder) / name)
    wanted = places if given is None else [given]
    found = next((place for place in wanted if place.exists()), None)
    if found is None and given is not None:
        raise UserError(f"{flag} {given}: {absence(given, 'folder')}")
    if found is None:
        there = " or ".join(map(str, places))
        cure = cure or f"python finetuning/fetch.py {name} fetches it"
        raise UserError(f"{flag}: not given, and nothing at {there}; {cure}")
    return found
