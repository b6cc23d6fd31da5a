"""The newest records and the curve of a metrics.jsonl, however long it is and while it is being written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support.records import RECORD, SCORES, open_log

from pretraining.reporting.metrics_file import METRICS, read_newest_records, read_step_records

KINDS = ("step", "evaluation")


def write(folder: Path, records: list[dict[str, Any]], torn: bytes = b"") -> Path:
    (folder / METRICS).write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + torn)
    return folder / METRICS


def step(number: int, loss: float | None = 5.0, **more: object) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss, **more}


def curve_of(path: Path, places: int) -> list[tuple[int, float]]:
    return [(logged.step, logged.figures["loss"]) for logged in read_step_records(path, places)]


def test_what_a_log_has_written_is_found(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.write(RECORD)
        log.write(SCORES)
    found = read_newest_records(tmp_path / METRICS, KINDS)
    assert found["step"]["pieces_per_second"] == RECORD.speed.pieces_per_second
    assert found["evaluation"]["masked_loss"] == SCORES.learns["masked_loss"]
    assert curve_of(tmp_path / METRICS, 200) == [(12000, RECORD.loss)]


def test_an_evaluation_is_found_beyond_the_last_lines(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "step": 7, "masked_loss": 6.0}
    path = write(tmp_path, [evaluation, *(step(number, filler="x" * 500) for number in range(8, 2000))])
    assert read_newest_records(path, KINDS) == {"step": step(1999, filler="x" * 500), "evaluation": evaluation}


@pytest.mark.parametrize(
    "torn", [b'{"kind": "step", "st', b"\0\0\0\0", b'{"kind": "step", "step": 3, "loss": 1.0}', b"\xff"]
)
def test_a_line_that_is_being_written_counts_for_nothing(torn: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, [step(1, 7.0), step(2, 6.0)], torn)
    assert read_newest_records(path, KINDS) == {"step": step(2, 6.0)}
    assert curve_of(path, 200) == [(1, 7.0), (2, 6.0)]


def test_of_steps_that_were_done_again_the_last_counts_and_an_empty_file_has_none(tmp_path: Path) -> None:
    path = write(tmp_path, [*(step(number, 9.0) for number in (1, 2, 3)), *(step(number, 8.0) for number in (2, 3, 4))])
    assert curve_of(path, 200) == [(1, 9.0), (2, 8.0), (3, 8.0), (4, 8.0)]
    path = write(tmp_path, [])
    assert (read_newest_records(path, KINDS), curve_of(path, 200)) == ({}, [])


def test_damaged_lines_and_losses_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, [step(1, 7.0)], b'garbage\n[1, 2]\n\n{"kind": "step", "step": 2, "loss": null}\n')
    assert read_newest_records(path, KINDS) == {"step": step(2, None)}
    assert curve_of(path, 200) == [(1, 7.0)]


def test_a_long_file_is_read_at_places_over_all_of_it(tmp_path: Path) -> None:
    lines = [b'{"kind": "step", "step": %d, "loss": %d.5}\n' % (number, number) for number in range(1, 200_001)]
    (tmp_path / METRICS).write_bytes(b"".join(lines))
    curve = curve_of(tmp_path / METRICS, 50)
    steps = [number for number, _ in curve]
    assert len(curve) < 10_000, "a sample, not all of it"
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 200_000)
    assert max(later - number for number, later in itertools.pairwise(steps)) < 200_000 / 45
    assert all(loss == number + 0.5 for number, loss in curve)
