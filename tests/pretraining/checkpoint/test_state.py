"""What checkpoints say of a run, also those of earlier versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.records import SCORES

from pretraining.checkpoint.record import CheckpointRecord, MadeBy
from pretraining.checkpoint.state import FoundMicroBatch, RunRecord, RunState
from pretraining.config.settings import Recipe
from pretraining.huggingface.model_card import DataSummary
from pretraining.model.shape import Shape

PHASES = [
    {"name": name, "length": length, "batch": 8, "micro_batch": "auto"} for name, length in (("a", 32), ("b", 64))
]
RECIPE = Recipe.model_validate({"phases": PHASES}).as_dict()
SUMMARY = DataSummary({"wiki": 3}, 100, {"32": 5}, {"pairs": "nsp"}, "vocabulary", "fingerprint")
FOUND = {"a": FoundMicroBatch(4, {"model": {"layers": 2, "next_sentence": True}})}


def record(section: dict[str, Any]) -> RunRecord:
    return RunRecord.of(CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, None, MadeBy(1, 0, "fp32"), section))


@pytest.mark.parametrize("scores", [SCORES, replace(SCORES, next_loss=None, next_accuracy=None), None])
def test_what_is_written_is_read(scores: Any) -> None:
    state = RunState(
        1, 2, 3.5, 7, examples_seen=56, pieces_seen=500, trained_length=64, begun_positions=80, trained_segments=1
    )
    written = RunRecord(state, RECIPE, SUMMARY, scores, [1.0], FOUND)
    assert record(written.as_json()) == written


def earlier_section(**changes: Any) -> dict[str, Any]:
    """As a version wrote it that had other names, counted less and gave every model both heads."""
    return {
        "progress": {"phase": 0, "phase_step": 3, "phase_seconds": 1.0, "step": 3},
        "recipe": RECIPE,
        "data": vars(SUMMARY),
        "metrics": {
            "step": 12000, "phase": 1, "masked": 5.8, "next_sentence": 0.69, "masked_accuracy": 0.12,
            "next_sentence_accuracy": 0.55, "examples": 1000, "seconds": 3.0, "perplexity": 330.3,
        },
        "logged_losses": [],
        "micro_batches": {"a": {"sequences": 4, "conditions": {"model": {"layers": 2}}}},
        **changes,
    }  # fmt: skip


def test_the_names_of_before_are_understood() -> None:
    found = record(earlier_section())
    assert found.scores == replace(SCORES, next_larger_class=None)  # which nobody counted
    assert found.micro_batches == FOUND


@pytest.mark.parametrize(
    ("phase", "phase_step", "length"), [(0, 3, 32), (1, 0, 32), (1, 1, 64), (2, 0, 64)], ids=lambda value: str(value)
)
def test_what_was_not_noted_follows_or_is_not_known(phase: int, phase_step: int, length: int) -> None:
    progress = {"phase": phase, "phase_step": phase_step, "phase_seconds": 1.0, "step": 3}
    state = record(earlier_section(progress=progress)).state
    assert (state.trained_length, state.trained_segments) == (length, 2)
    state.advance(8, 48)
    state.count_pieces(100)
    assert (state.trained_length, state.examples_seen, state.pieces_seen) == (max(length, 48), None, None)
    unpaired = earlier_section(data=vars(replace(SUMMARY, settings={"pairs": "none"})))
    assert record(unpaired).state.trained_segments == 1
