"""Mistakes in the words of benchmarks are told in one line, before anything is measured; and what one measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.training import Place

from benchmarks import inference, optimizers, throughput
from benchmarks.measure import read_results, run_command

ENTRIES: dict[str, tuple[type[Any], Callable[[Any, Console], int | None]]] = {
    "inference": (inference.Inference, inference.measure),
    "optimizers": (optimizers.Optimizers, optimizers.measure),
    "throughput": (throughput.Throughput, throughput.measure),
}
MISTAKES = {
    "inference --sizes huge": "--sizes huge: is none of tiny",
    "inference --sides nobody": "--sides nobody: is none of",
    "inference --rounds 0": "at least 1",
    "inference --model nothing": "nothing",
    "optimizers --optimizers sgd": "--optimizers: of adamw, lamb, muon",
    "optimizers --size huge": "--size: of tiny",
    "optimizers --rounds 0": "--rounds from 1 on",
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
    monkeypatch.setattr(optimizers, "LENGTH", 32)
    settings = optimizers.Optimizers(shared.data, "tiny", ("lamb",), rounds=2, out=tmp_path / "found.json")
    optimizers.measure(settings, Console(quiet=True))
    adam, lamb = read_results(tmp_path / "found.json")["rows"]
    assert (adam["optimizer"], lamb["optimizer"]) == ("adamw", "lamb")
    assert adam["times_adamw"]["median"] == 1
    assert lamb["times_adamw"]["lowest"] > 0
