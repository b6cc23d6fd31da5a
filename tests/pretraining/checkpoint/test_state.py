"""What checkpoints say of a run; those of other versions are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.records import SCORES

from data_prep.common.errors import DamageError, UserError
from pretraining.checkpoint.reading import find_newest_whole
from pretraining.checkpoint.record import (
    CHECKSUM,
    FOLDER,
    RECORD,
    CheckpointRecord,
    MadeBy,
    _checksum,
    is_finished,
    write_record,
)
from pretraining.checkpoint.state import FoundMicroBatch, RunRecord, RunState, Saved
from pretraining.config.settings import Recipe
from pretraining.huggingface.model_card import DataSummary
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import find_objective

PHASES = [
    {"name": name, "length": length, "batch": 8, "micro_batch": "auto"} for name, length in (("a", 32), ("b", 64))
]
RECIPE = Recipe.model_validate({"phases": PHASES})
SUMMARY = DataSummary({"wiki": 3}, 100, {"32": 5}, {"pairs": "nsp"}, "vocabulary", "fingerprint")
FOUND = {"a": FoundMicroBatch(4, {"model": {"layers": 2, "pairs": True}})}


def record(section: dict[str, Any]) -> RunRecord:
    return RunRecord.from_checkpoint(
        CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, None, MadeBy(1, 0, "fp32"), section)
    )


@pytest.mark.parametrize("scores", [SCORES, replace(SCORES, learns={"masked_loss": 5.0}), None])
def test_what_is_written_is_read(scores: Any) -> None:
    state = RunState(
        1, 2, 3.5, 7, examples_seen=56, pieces_seen=500, trained_length=64, begun_positions=80, trained_segments=1
    )
    written = RunRecord(state, RECIPE, SUMMARY, scores, [1.0], FOUND)
    assert record(written.as_json()) == written


def rewritten(folder: Path, **changed: Any) -> None:
    """Writes a record with other content, under its right checksum."""
    write_record(folder, CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, None, MadeBy(1, 0, "fp32"), {}))
    content = {**json.loads((folder / RECORD).read_text()), **changed}
    content.pop(CHECKSUM)
    (folder / RECORD).write_text(json.dumps({**content, CHECKSUM: _checksum(content)}))


SIZES = {"layers": 1, "hidden": 8, "heads": 1, "intermediate": 8, "vocabulary": 9}


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        *(({"format": version}, rf"\(format {version}, here \d+\)") for version in (None, 1, 99)),
        ({}, ".*'causal'.*; go on with the"),
    ],
)
def test_what_another_version_wrote_is_not_damaged(tmp_path: Path, other: dict[str, Any], fault: str) -> None:
    """Its shape said `causal`, and its recipe had the objective as a word."""
    checkpoint = tmp_path / FOLDER / "step-00000007"
    checkpoint.mkdir(parents=True)
    written = {"shape": {**SIZES, "objective": "mlm", "causal": False}, "caller": {"recipe": {"objective": "mlm"}}}
    rewritten(checkpoint, **written, **other)
    with pytest.raises(UserError, match=fault) as caught:
        find_newest_whole(tmp_path, pytest.fail)
    assert not isinstance(caught.value, DamageError)
    assert is_finished(checkpoint)


@pytest.mark.parametrize(
    ("objective", "fault"),
    [
        ({"name": "gone"}, r'objective\.name = "gone": one of .*"mlm"'),
        ({"name": "mlm", "gone": 1}, r"objective\.gone: unknown; there is name, "),
    ],
)
def test_an_objective_that_is_gone_is_named_with_its_cure(tmp_path: Path, objective: Any, fault: str) -> None:
    """Also a setting of one."""
    section = RunRecord(RunState(), RECIPE, SUMMARY, None, []).as_json()
    section["recipe"]["objective"] = objective
    write_record(tmp_path, CheckpointRecord(Shape(1, 8, 1, 8, 9), 7, 7.0, None, MadeBy(1, 0, "fp32"), section))
    with pytest.raises(UserError, match=f"^{tmp_path}: the recipe of a checkpoint is none of today: {fault}") as caught:
        Saved.read(tmp_path)
    assert "put back the file of an objective or optimizer that is gone" in str(caught.value)


def test_a_model_whose_objective_is_gone_is_named() -> None:
    with pytest.raises(UserError, match=r'^objective\.name = "gone": there is .*mlm.*; put back .*/gone\.py'):
        find_objective(replace(Shape.from_size("tiny", 100), objective="gone"))
