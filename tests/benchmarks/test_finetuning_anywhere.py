"""The benchmark of fine-tuning as a newcomer has it: no real tasks, and no peer."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import fine_tuning
from benchmarks.fine_tuning import DEMO, FineTuningSpeed, find_contests
from benchmarks.measure import read_results
from data_prep.common.errors import UserError


@pytest.mark.slow
def test_without_data_or_peer_we_are_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fine_tuning, "find_missing_packages", lambda *_: ["transformers"])
    console, out = Console(record=True, width=160), tmp_path / "out.json"
    asked = FineTuningSpeed(size="tiny", data=tmp_path, contests=(), steps=2, rounds=1, out=out, numbers=("fp32",))
    fine_tuning.measure(asked, console)
    said = console.export_text()
    assert "the sentences are those of the demo corpus" in said
    assert "not installed: transformers; nothing is compared with" in said
    contests = read_results(out)["models"]["tiny"]["contests"]
    assert contests.keys() == {f"{name}, alone" for name in DEMO}, "results of real tasks, or with a peer, are kept"
    for contest in contests.values():
        for figures in contest["against"]["fp32"].values():
            assert figures["cloze_items_per_second"] > 0
            assert "times_as_fast" not in figures, "a ratio needs both sides"


def test_contests_are_those_whose_data_is_there(tmp_path: Path) -> None:
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    console = Console(quiet=True)
    assert find_contests(FineTuningSpeed(data=tmp_path), console) == ["cola-padded", "cola-dynamic"]
    with pytest.raises(UserError, match=r"--contests squad-padded: .* has no data for it; set CLOZE_DATA"):
        find_contests(FineTuningSpeed(data=tmp_path, contests=("squad-padded",)), console)
    with pytest.raises(UserError, match="--contests sst2-pad: is none of sst2-padded"):
        find_contests(FineTuningSpeed(data=tmp_path, contests=("sst2-pad",)), console)
