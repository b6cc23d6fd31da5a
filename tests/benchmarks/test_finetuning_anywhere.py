"""The benchmark of fine-tuning as a newcomer has it: no real tasks, and no peer."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import finetuning
from benchmarks.finetuning import Finetuning, find_tasks
from benchmarks.measure import read_results
from data_prep.common.errors import UserError


def test_without_data_or_peer_we_are_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuning, "missing", lambda: ["transformers"])
    console, out = Console(record=True, width=160), tmp_path / "out.json"
    asked = Finetuning(
        size="tiny", data=tmp_path, contests=("sst2-dynamic",), steps=2, rounds=1, out=out, numbers=("fp32",)
    )
    finetuning.measure(asked, console)
    said = console.export_text()
    assert "the sentences are those of the demo corpus" in said
    assert "not installed: transformers; nothing is compared with" in said
    [against] = read_results(out)["models"]["tiny"]["contests"]["sst2-dynamic"]["against"].values()
    for what in ("training", "prediction"):
        assert against[what]["cloze_items_per_second"] > 0
        assert "times_as_fast" not in against[what], "a ratio needs both sides"


def test_a_contest_without_its_data_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--contests squad-padded: there is no data for it"):
        find_tasks(Finetuning(data=tmp_path, contests=("squad-padded",)), tmp_path, Console(quiet=True))
