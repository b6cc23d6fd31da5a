"""A training command after it was read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_prep.shards import Manifest
from pretraining.checkpoint.models import StoredModel
from pretraining.config.settings import Recipe
from pretraining.model.shape import Shape
from pretraining.scoring.pairs import Pair


@dataclass(frozen=True)
class Request:
    """A command to train a recipe on a folder of shards, with the results in a folder of its own."""

    recipe: Recipe
    data: Path
    manifest: Manifest
    out: Path
    """folder of the run"""
    origin: StoredModel | None = None
    """base model of a new run; None if weights are drawn at random or the run continues"""
    resume: Literal["auto", "never"] = "auto"
    stop_after: str | None = None
    """name of the phase to stop after"""
    time_limit: float | None = None
    """seconds from the start of the process"""
    profile: int = 0
    """number of steps to profile"""
    pairs: tuple[Pair, ...] = ()
    """minimal pairs that are scored at the ends of phases"""
    notes: tuple[str, ...] = ()
    """lines on these pairs, printed when the run begins"""
    command: tuple[str, ...] = ()
    """words of the command line, for messages that suggest another command"""

    @property
    def shape(self) -> Shape:
        """The sizes of the model: from the recipe, the vocabulary, and the heads that the data can train."""
        return self.recipe.shape(self.manifest)

    @property
    def num_phases(self) -> int:
        """Number of phases to train now, counted from the first of the recipe."""
        names = [phase.name for phase in self.recipe.phases]
        return len(names) if self.stop_after is None else names.index(self.stop_after) + 1
