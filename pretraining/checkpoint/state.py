"""The progress of a run, and the section of its checkpoints that records it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.reading import explain, leave_out_removed
from data_prep.common.sections import May, list_settings
from data_prep.common.toml_text import dotted
from data_prep.vocabulary.source import read_vocabulary
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.checkpoint.record import CheckpointRecord, read_record
from pretraining.config.settings import Recipe
from pretraining.huggingface.model_card import BaseSummary, BranchSummary, DataSummary
from pretraining.reporting.records import EvaluationRecord


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch that was found for a phase with "auto", and the conditions of the search."""

    sequences: int
    conditions: dict[str, object]
    """hardware and settings; where any of them differs, another may fit"""


@dataclass
class RunState:
    """The progress of a run: all state that changes in training, except the engine's."""

    phase: int = 0
    """number of the phase, counted from 0"""
    phase_step: int = 0
    """steps done of this phase"""
    phase_seconds: float = 0.0
    """seconds trained in this phase"""
    kept_step: int = 0
    """`phase_step` of the last checkpoint that a rollback goes back to; 0 where the phase has none yet"""
    step: int = 0
    """steps done in all phases"""
    examples_seen: int = 0
    """examples of all these steps, over all ranks"""
    pieces_seen: int = 0
    """pieces of these examples, up to the last logged step"""
    trained_length: int = 0
    """longest sequences that the weights were trained on, in this run or before"""
    begun_positions: int = 0
    """positions with embeddings in the base model, which count as trained"""
    trained_segments: int = 2
    """segments that the weights were trained on, in this run or before: 1 without pairs"""
    corpora: list[dict[str, dict[str, int]]] = field(default_factory=list)
    """for each phase from the first on, what it reads of each corpus with a name: its shares `first` and `last`, in
    millionths, the length `stored` of its examples, and once the phase is done its `sequences`, also those `skipped`"""

    def note_corpora(self, read: dict[str, dict[str, int]]) -> None:
        """Notes what this phase reads of each corpus."""
        before = self.corpora[: self.phase]
        self.corpora = [*before, *({} for _ in range(self.phase - len(before))), read]

    def count_read(self, corpus: str, stored: int) -> int:
        """Counts the sequences of a corpus, of a stored length, that the phases before this one have read."""
        found = (each[corpus] for each in self.corpora[: self.phase] if corpus in each)
        return sum(each["sequences"] for each in found if each["stored"] == stored)

    def advance(self, examples: int, length: int) -> None:
        """Counts one more step, on a number of examples of this length."""
        self.step += 1
        self.phase_step += 1
        self.trained_length = max(self.trained_length, length)
        self.examples_seen += examples

    @property
    def known_positions(self) -> int:
        """Number of positions with trained embeddings."""
        return max(self.trained_length, self.begun_positions)

    def begin_phase(self, number: int) -> None:
        """Moves to the beginning of a phase."""
        self.phase, self.phase_step, self.phase_seconds, self.kept_step = number, 0, 0.0, 0


NOT_LEARNED = ("data =", "optimizer.kernels", "precision.loss_scale", *list_settings(Recipe, May.CHANGE_BETWEEN_STARTS))
"""Beginnings of settings that say how a run is done, not what it learns."""


@dataclass(frozen=True)
class RunRecord:
    """The section of a checkpoint's record that belongs to pre-training."""

    state: RunState
    recipe: Recipe
    data: DataSummary
    scores: EvaluationRecord | None
    """the latest evaluation"""
    logged_losses: list[float]
    """latest losses of this phase; leaps are measured against their median"""
    micro_batches: dict[str, FoundMicroBatch] = field(default_factory=dict)
    """micro-batches that were found, by phase name"""
    base: BaseSummary | None = None
    """base model of the run; None if its weights were drawn at random"""
    leapt: float | None = None
    """loss of the last step if it leapt, so that no run returns to this checkpoint; otherwise None"""
    branch: BranchSummary | None = None
    """where the run branched off from another; None if it did not"""
    skips: list[list[Any]] | None = None
    """batches that were left out, each with phase, first, count and reason; None in older checkpoints"""
    same_bits: dict[str, Any] | None = None
    """what the bits depend on besides the recipe; None without `parallel.same_bits`"""
    lost: tuple[str, ...] = ()
    """what the run was trained with and cannot be trained with any more; it can still be read"""

    @property
    def is_trained(self) -> bool:
        """Whether all phases of its own recipe are trained."""
        return self.state.phase >= len(self.recipe.phases)

    def as_json(self) -> dict[str, Any]:
        """Converts the section to JSON."""
        return {
            "progress": {name: value for name, value in asdict(self.state).items() if value != []},
            "recipe": self.recipe.as_dict(),
            "data": self.data.as_json(),
            "metrics": {} if self.scores is None else self.scores.figures(),
            "logged_losses": self.logged_losses,
            "micro_batches": {name: asdict(found) for name, found in self.micro_batches.items()},
            "base": None if self.base is None else asdict(self.base),
            "leapt": self.leapt,
            "skips": self.skips,
            **({} if self.same_bits is None else {"same_bits": self.same_bits}),
            **({} if self.branch is None else {"branch": asdict(self.branch)}),
        }

    @classmethod
    def from_checkpoint(cls, record: CheckpointRecord, where: Path) -> RunRecord:
        """Parses the section of a checkpoint in this folder; raises UserError if another version wrote it."""
        section = record.caller
        try:
            recipe, lost = leave_out_removed(Recipe, section["recipe"])
            return cls(
                state=RunState(**{"kept_step": section["progress"]["phase_step"], **section["progress"]}),
                recipe=Recipe.model_validate(recipe),
                lost=tuple(fault for fault in lost if not fault.startswith(NOT_LEARNED)),
                data=DataSummary(**section["data"]),
                scores=EvaluationRecord.from_figures(section["metrics"]) if section["metrics"] else None,
                logged_losses=section["logged_losses"],
                micro_batches={name: FoundMicroBatch(**found) for name, found in section["micro_batches"].items()},
                base=BaseSummary(**section["base"]) if section["base"] else None,
                leapt=section.get("leapt"),
                branch=BranchSummary(**section["branch"]) if section.get("branch") else None,
                skips=section.get("skips"),
                same_bits=section.get("same_bits"),
            )
        except ValidationError as error:
            faults = [f"{dotted(fault['loc'])}{explain(fault, Recipe)}" for fault in error.errors()]
            raise UserError(
                f"{where}: the recipe of a checkpoint is none of today: {'; '.join(faults)}\n"
                "go on with the version of this program that wrote it, put back the file of an objective or optimizer "
                "that is gone, or begin anew in another --out folder"
            ) from error
        except (KeyError, TypeError) as error:
            raise UserError(f"{where}: its record was not written by pre-training as it is today: {error}") from error


@dataclass(frozen=True)
class Saved:
    """A checkpoint of pre-training, with its parsed record."""

    folder: Path
    record: CheckpointRecord
    run: RunRecord
    """the section of the record on the progress of the run"""

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Reads a checkpoint except its tensors."""
        record = read_record(folder)
        return cls(folder, record, RunRecord.from_checkpoint(record, folder))

    def read_vocabulary(self) -> Vocabulary:
        """Reads the vocabulary of its run; raises UserError if it is not the one that it was trained with."""
        vocabulary = read_vocabulary(self.folder)
        if vocabulary.sha256 != self.run.data.vocabulary:
            raise UserError(f"{self.folder}: the vocabulary of its run is not the one that it was trained with")
        return vocabulary
