"""A training command after it was read and checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pretraining.checkpoint.models import StoredModel
from pretraining.checkpoint.record import FOLDER, find_checkpoint, list_finished, parse_step
from pretraining.config.settings import Recipe
from pretraining.data.corpora import Corpora
from pretraining.model.shape import Shape
from pretraining.scoring.pairs import Pair
from pretraining.scoring.retrieval import Retrieval


@dataclass(frozen=True)
class Branch:
    """A checkpoint of another run, as `--branch` names it: RUN@STEP, or RUN for the newest."""

    text: str
    """what was typed"""
    place: Path
    """folder of the run, or of the checkpoint itself"""
    step: int | None
    """step of the checkpoint; None for the newest"""

    @classmethod
    def parse(cls, text: str) -> Branch:
        """Parses a folder, whose name may contain @, or a folder and a step."""
        place, at, step = text.rpartition("@")
        if os.path.exists(text) or not at or not step.isdecimal():
            step_of_folder = parse_step(Path(text))
            return cls(text, Path(text), step_of_folder if step_of_folder >= 0 else None)
        return cls(text, Path(place), int(step))

    @property
    def run(self) -> Path:
        """Folder of the run; that of the checkpoint if it is a copy outside of one."""
        folder = self.place.resolve().parent
        return folder.parent if parse_step(self.place) >= 0 and folder.name == FOLDER else self.place

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.run.resolve().name

    def __str__(self) -> str:
        return self.text

    def find(self) -> Path:
        """Finds the folder of the checkpoint; raises UserError with those that there are."""
        return find_checkpoint(self.place, None if self.step is None else f"step-{self.step:08}")


def find_earlier(out: Path | None, branch: str | None) -> Path | None:
    """Finds what a run goes on from: checkpoints in its own folder, or else that of `--branch`."""
    return out if branch is None or (out is not None and list_finished(out)) else Branch.parse(branch).find()


@dataclass(frozen=True)
class Request:
    """A command to train a recipe on shards, with the results in a folder of its own."""

    recipe: Recipe
    corpora: Corpora
    out: Path
    """folder of the run"""
    origin: StoredModel | None = None
    """base model of a new run; None if weights are drawn at random or the run continues"""
    stop_after: str | None = None
    """name of the phase to stop after"""
    time_limit: float | None = None
    """seconds from the start of the process"""
    profile: int = 0
    """number of steps to profile"""
    pairs: tuple[Pair, ...] = ()
    """minimal pairs that are scored at the ends of phases"""
    retrieval: Retrieval | None = None
    """passages to be found at the ends of phases"""
    notes: tuple[str, ...] = ()
    """lines on these pairs and passages, printed when the run begins"""
    branch: Branch | None = None
    """checkpoint of another run that a new run goes on from; None if it does not"""

    @property
    def shape(self) -> Shape:
        """The sizes of the model after the last phase."""
        return self.shape_in(len(self.recipe.phases))

    def shape_in(self, phase: int) -> Shape:
        """Computes the sizes of the model in a phase, or after all: from the recipe, the vocabulary, and the heads that
        the data can train."""
        settings = self.recipe.phases[min(phase, len(self.recipe.phases) - 1)]
        return self.recipe.in_phase(settings).shape(self.corpora.common)

    @property
    def num_phases(self) -> int:
        """Number of phases to train now, counted from the first of the recipe."""
        names = [phase.name for phase in self.recipe.phases]
        return len(names) if self.stop_after is None else names.index(self.stop_after) + 1
