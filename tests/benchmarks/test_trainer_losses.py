"""Our fine-tuning has the losses of transformers' Trainer where nothing differs, and others where something does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from benchmarks.fine_tuning import make_model
from benchmarks.loss_sides import DIFFERENCES, Known, Trial, compared, differences_of
from benchmarks.texts import write_demo_task

pytest.importorskip("accelerate")
PAGE = (ROOT / "docs" / "exactness.md").read_text()


def apart(trial: Trial, name: str, known: Known) -> float:
    found = compared(replace(trial, difference=DIFFERENCES[name]), known)
    return float(found["at most"])


@pytest.mark.slow
def test_only_what_differs_makes_losses_differ(tmp_path: Path) -> None:
    known: Known = {}
    data = write_demo_task(tmp_path / "data")
    trial = Trial("sst2", make_model("tiny", data, tmp_path / "tiny"), data, 4, 1e-3, tmp_path)
    assert apart(trial, "nothing", known) < 1e-5
    assert apart(trial, "order: each draws its own", known) > 1e-4
    assert len(known) == 1, "our side has computed once"


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_fifty_steps_have_the_losses_of_the_trainer(task: str, real_data: Path, tmp_path: Path) -> None:
    model = make_model("tiny", real_data, tmp_path / "tiny")
    trial = Trial(task, model, real_data, 50, 1e-3, tmp_path)
    assert apart(trial, "nothing", {}) < 1e-5


def test_the_page_has_all_differences() -> None:
    assert {name for name in differences_of("score") if name not in PAGE} == set()
    assert set(differences_of("score")) - set(differences_of("classes")) == {"numbers: with mean 0 and spread 1 here"}
