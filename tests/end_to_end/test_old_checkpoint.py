"""A checkpoint that an earlier version wrote is continued with today's command, and gives what that version gave.

tests/fixtures/d003f68 has the checkpoint of step 3 that version d003f68 made of recipe.toml, and in expected.jsonl what
its run logged in all 8 steps.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import pytest
from support.processes import ROOT
from support.training import Place, assert_well, records, train
from transformers import AutoTokenizer

FIXTURE = ROOT / "tests" / "fixtures" / "d003f68"
CLOCK = {
    *("pieces_per_second", "padded_pieces_per_second", "flops_utilisation", "waiting_for_data", "peak_memory_bytes"),
    *("seconds_per_step", "evaluation_seconds", "seconds_left", "time"),
}
"""What depends on the machine and the moment."""


def expected_records(kind: str, after: int) -> list[dict[str, Any]]:
    """What the earlier version logged after a step, without what the clock says."""
    lines = [json.loads(line) for line in (FIXTURE / "expected.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in CLOCK}
        for line in lines
        if line["kind"] == kind and line["step"] > after
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_an_earlier_version_goes_on_as_it_would_have_then(place: Place, ranks: int) -> None:
    shutil.copytree(FIXTURE / "checkpoints", place.folder / "run" / "checkpoints")
    command = dataclasses.replace(place, recipe=FIXTURE / "recipe.toml").command("run")
    assert "continues after step 3\n" in assert_well(train(command, ranks))
    run = place.folder / "run"
    assert AutoTokenizer.from_pretrained(run / "export").model_max_length == 64
    assert "next_larger_class" not in records(run)[0]  # begun by that version, which did not count it
    for kind in ("step", "evaluation"):
        for record, expected in zip(records(place.folder / "run", kind), expected_records(kind, after=3), strict=True):
            for name, value in expected.items():
                wanted = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
                assert record[name] == wanted, f"{name} of the {kind} {expected['step']}"
