"""Where a run stands, and what its checkpoints say of that."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.toml_text import dotted
from data_prep.common.wording import explain
from pretraining.checkpoint.record import CheckpointRecord, read_record
from pretraining.config.settings import Recipe
from pretraining.huggingface.model_card import BaseSummary, DataSummary
from pretraining.reporting.records import EvaluationRecord


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch of a phase that has "auto", and what it was found for."""

    sequences: int
    conditions: dict[str, object]
    """hardware and settings; where any of them differs, another may fit"""


@dataclass
class RunState:
    """Where a run stands: all that moves while it trains, besides the engine."""

    phase: int = 0
    """number of the phase, counted from 0"""
    phase_step: int = 0
    """steps done of this phase"""
    phase_seconds: float = 0.0
    """seconds trained in this phase"""
    step: int = 0
    """steps done in all phases"""
    examples_seen: int = 0
    """examples of all these steps, over all ranks"""
    pieces_seen: int = 0
    """pieces of the steps up to the last that was logged, likewise"""
    trained_length: int = 0
    """the longest sequences that the weights were trained on, in this run or before it"""
    begun_positions: int = 0
    """positions that the model which the run began with had embeddings of, trained as far as anybody knows"""
    trained_segments: int = 2
    """segments that they were trained on, in this run or before it: 1 where there never were pairs"""

    def advance(self, examples: int, length: int) -> None:
        """Counts one more step, on so many examples of this length."""
        self.step += 1
        self.phase_step += 1
        self.trained_length = max(self.trained_length, length)
        self.examples_seen += examples

    @property
    def known_positions(self) -> int:
        """Positions from the first on whose embeddings are worth keeping; those beyond were never trained."""
        return max(self.trained_length, self.begun_positions)

    def begin_phase(self, number: int) -> None:
        """Stands at the beginning of a phase."""
        self.phase, self.phase_step, self.phase_seconds = number, 0, 0.0


@dataclass(frozen=True)
class RunRecord:
    """The section of a checkpoint's record that belongs to pre-training."""

    state: RunState
    recipe: Recipe
    data: DataSummary
    scores: EvaluationRecord | None
    """the latest evaluation"""
    logged_losses: list[float]
    """the latest losses of this phase, against which a leap is measured"""
    micro_batches: dict[str, FoundMicroBatch] = field(default_factory=dict)
    """micro-batches that were found, by the names of their phases"""
    base: BaseSummary | None = None
    """the model whose weights the run began with; None where they were drawn"""
    leapt: float | None = None
    """the loss of the last step where it leapt over those before it, so that no run goes back there"""

    @property
    def is_trained(self) -> bool:
        """Whether all phases of its own recipe are."""
        return self.state.phase >= len(self.recipe.phases)

    def as_json(self) -> dict[str, Any]:
        """The section as checkpoint.json has it."""
        return {
            "progress": asdict(self.state),
            "recipe": self.recipe.as_dict(),
            "data": asdict(self.data),
            "metrics": {} if self.scores is None else self.scores.figures(),
            "logged_losses": self.logged_losses,
            "micro_batches": {name: asdict(found) for name, found in self.micro_batches.items()},
            "base": None if self.base is None else asdict(self.base),
            "leapt": self.leapt,
        }

    @classmethod
    def from_checkpoint(cls, record: CheckpointRecord) -> RunRecord:
        """Reads the section."""
        section = record.caller
        try:
            return cls(
                state=RunState(**section["progress"]),
                recipe=Recipe.model_validate(section["recipe"]),
                data=DataSummary(**section["data"]),
                scores=EvaluationRecord.from_figures(section["metrics"]) if section["metrics"] else None,
                logged_losses=section["logged_losses"],
                micro_batches={name: FoundMicroBatch(**found) for name, found in section["micro_batches"].items()},
                base=BaseSummary(**section["base"]) if section["base"] else None,
                leapt=section.get("leapt"),
            )
        except ValidationError as error:
            faults = [f"{dotted(fault['loc'])}{explain(fault, False, Recipe)}" for fault in error.errors()]
            raise UserError(
                f"the recipe of a checkpoint is none of today: {'; '.join(faults)}\ngo on with the version of this "
                "program that wrote it, put back the file of an objective or optimizer that is gone, or begin anew in "
                "another --out folder"
            ) from error
        except (KeyError, TypeError) as error:
            raise UserError(f"a checkpoint's record was not written by pre-training as it is today: {error}") from error


@dataclass(frozen=True)
class Saved:
    """A checkpoint of pre-training, with what it says."""

    folder: Path
    record: CheckpointRecord
    run: RunRecord
    """the section of the record that says where the run stands"""

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Reads all but the tensors."""
        record = read_record(folder)
        try:
            return cls(folder, record, RunRecord.from_checkpoint(record))
        except UserError as error:
            raise UserError(f"{folder}: {error}") from error
