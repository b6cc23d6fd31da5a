"""A training command, read and checked."""

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
    """the model whose weights a new run begins with; None where they are drawn, or the run goes on"""
    resume: Literal["auto", "never"] = "auto"
    stop_after: str | None = None
    """name of the phase that is the last for now"""
    time_limit: float | None = None
    """seconds from the start of the process"""
    profile: int = 0
    """steps of which a profile is written"""
    pairs: tuple[Pair, ...] = ()
    """minimal pairs that are asked at the ends of phases"""
    notes: tuple[str, ...] = ()
    """lines on these pairs, which the run begins with"""
    command: tuple[str, ...] = ()
    """the words that were typed, for messages that name another command"""

    @property
    def shape(self) -> Shape:
        """The sizes of the model: those of the recipe, the vocabulary of the data, and the heads that it can train."""
        return self.recipe.shape(self.manifest)

    @property
    def num_phases(self) -> int:
        """How many phases are to be trained now, counted from the first of the recipe."""
        names = [phase.name for phase in self.recipe.phases]
        return len(names) if self.stop_after is None else names.index(self.stop_after) + 1
