"""Mistakes in the words of benchmarks are told in one line, before anything is measured; and what one measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.training import Place

from benchmarks import fine_tuning, inference, optimizers, throughput
from benchmarks.measure import read_results, run_command
from benchmarks.training_sides import Contest

ENTRIES: dict[str, tuple[type[Any], Callable[[Any, Console], int | None]]] = {
    "fine_tuning": (fine_tuning.FineTuningSpeed, fine_tuning.measure),
    "inference": (inference.Inference, inference.measure),
    "throughput": (throughput.Throughput, throughput.measure),
}
MISTAKES = {
    "fine_tuning --contests tiny-demo-pad": "tiny-demo-pad: no contest; give SIZE-TASK-padded",
    "inference --contests huge-128-1": "huge-128-1: no contest",
    "inference --contests base-0-1": "base-0-1: no contest",
    "inference --rounds 0": "at least 1",
    "throughput --shards benchmarks": "benchmarks: no shards there",
    "throughput --contests huge-128-2": "huge-128-2: no contest",
    "throughput --contests tiny-32-2 tiny-32-4": "tiny-32 is given twice",
    "throughput --against bing": "--against bing: is none of",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_told_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, *words = command.split()
    monkeypatch.setattr("sys.argv", [entry, *words, "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        run_command(*ENTRIES[entry])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert MISTAKES[command] in line


@pytest.mark.slow
def test_optimizers_take_turns(shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "CONTEST", Contest.parse("tiny-32-2"))
    monkeypatch.setattr(optimizers, "find_shards", lambda *_: shared.data)
    optimizers.measure(optimizers.Optimizers(tmp_path / "found.json"), Console(quiet=True))
    adam, lamb, _ = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0
