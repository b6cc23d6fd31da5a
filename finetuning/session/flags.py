"""Flags of all commands of fine-tuning, and the search for data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from data_prep.common.errors import UserError
from data_prep.common.files import absence
from finetuning.tasks.task import Setup, Task


class Suite(NamedTuple):
    """The tasks of a command."""

    name: str
    """The last part of the folder of results."""
    recipe: str
    """The default recipe."""
    small_recipe: str | None = None
    """The default recipe for miniatures, if different."""


@dataclass(frozen=True)
class TuningFlags:
    """Flags of all commands of fine-tuning; every value of the recipe can be given as --section.key VALUE."""

    model: str | None = None
    """A run, a folder of transformers, or a name on the Hugging Face hub (default: the newest exported model)."""
    sees: Literal["both", "before"] | None = None
    """Of a model of the objective hybrid: whether a piece sees both sides or those before it (default: both)."""
    backward: str | None = None
    """A second model, whose frozen features are concatenated with those of the first, layer by layer: with
    --features.layers mix, a left-to-right and a right-to-left model are ELMo's scheme."""
    out: Path | None = None
    """Where results go (default: runs/MODEL/…)."""
    recipe: str | None = None
    """TOML file of training settings, or the name of one in finetuning/recipes (default: by task and size)."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try."""
    seeds: int | None = None
    """Restarts of each run, with another order of the data and another head."""
    from_scratch: bool = False
    """Start from fresh weights of the model's sizes, to measure the benefit of pre-training."""
    evaluate: bool = False
    """Score a model that is already fine-tuned for the task, without training."""
    share: bool = False
    """Share the runs with other commands in the same folder; a command without this flag then concludes."""
    check: bool = False
    """Print what will be done, and stop."""
    time_limit: str = "auto"
    """Save and stop ahead of this, counted from the start: 90m, 2h (default: the end of the Slurm job)."""

    def suite(self) -> Suite:
        """Returns the tasks of the command, with their recipes."""
        raise NotImplementedError

    def open_tasks(self, setup: Setup) -> list[Task]:
        """Reads the files of all tasks."""
        raise NotImplementedError

    def finish(self, out: Path, tasks: Sequence[Task], console: Console) -> None:
        """Finishes the command after all runs of all tasks."""

    def overrides(self) -> list[str]:
        """Returns the command's own flags as overrides of settings."""
        learning_rates = [f"--search.learning_rates={list(self.learning_rates)}"] * bool(self.learning_rates)
        return learning_rates + ([] if self.seeds is None else [f"--search.seeds={self.seeds}"])


def find_data(given: Path | None, name: str, cure: str = "", flag: str = "--data") -> Path:
    """Finds the folder of data: the given one, or the first of the usual places of this name.

    `cure` tells a user without the data what to do (default: fetch it); `flag` is the flag that names the folder.
    """
    places = [Path("data") / name]
    if folder := os.environ.get("CLOZE_DATA"):
        places.append(Path(folder) / name)
    found = next((place for place in (places if given is None else [given]) if place.exists()), None)
    if found is None and given is not None:
        raise UserError(f"{flag} {given}: {absence(given, 'folder')}")
    if found is None:
        there = " or ".join(map(str, places))
        cure = cure or f"python finetuning/fetch.py {name} fetches it"
        raise UserError(f"{flag}: not given, and nothing at {there}; {cure}")
    return found
