"""The benchmark of downstream scores: three sides on the same items, kept part by part, and not done twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.base_models import write_bert
from support.tasks import VOCABULARY

from benchmarks import downstream
from benchmarks.downstream import PARTS, SIDES, Downstream, budget, measure
from data_prep.common.errors import UserError


def write_cola(folder: Path) -> None:
    """Sentences of which those with an `a` are right."""
    folder.mkdir(parents=True)
    rows = [f"x\t{number % 2}\t\t{'a' if number % 2 else 'b'} {'cde'[number % 3]}\n" for number in range(32)]
    (folder / "train.tsv").write_text("".join(rows))
    (folder / "dev.tsv").write_text("".join(rows[:16]))


@pytest.mark.slow
def test_three_sides_are_scored_and_not_trained_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cola(tmp_path / "data" / "glue" / "CoLA")
    model = write_bert(tmp_path / "model", VOCABULARY, positions=128)
    monkeypatch.setitem(PARTS, "cola", replace(PARTS["cola"], seeds=1))
    settings = Downstream(
        model, tmp_path / "data", ("cola",), epochs=1, work=tmp_path / "work", out=tmp_path / "out.json"
    )
    found = measure(settings, Console(quiet=True))
    part = found["parts"]["cola"]
    assert [len(part[side]["scores"]) for side in SIDES] == [1, 1, 1]
    assert {part[side]["metric"] for side in SIDES} == {"matthews"}
    assert found["model"]["name"] == "model"
    assert json.loads((tmp_path / "out.json").read_text()) == found
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()

    def refuse(*_: Any) -> None:
        raise AssertionError("it was trained again")

    monkeypatch.setattr(downstream, "train_theirs", refuse)
    again = measure(settings, Console(quiet=True))
    assert again["parts"] == found["parts"]
    with pytest.raises(UserError, match="holds runs with other settings"):
        downstream.run_theirs(replace(settings, learning_rate=1e-3), "cola", "transformers")


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--parts mnli: is none of sst2, cola"):
        measure(Downstream(tmp_path, parts=("mnli",)), Console(quiet=True))


def test_the_budget_is_what_the_card_and_the_metrics_say(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").write_text("# A\n\n## Training\n\n- 3 steps\n\n## Validation\n\nnone\n")
    steps = [
        {"kind": "step", "step": 100, "seconds_per_step": 9.0},
        {"kind": "step", "step": 300, "seconds_per_step": 4.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    assert budget(tmp_path / "export") == {"training": ["- 3 steps"], "training_hours": 0.5}
