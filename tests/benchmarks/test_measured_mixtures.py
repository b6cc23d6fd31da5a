"""Measured mixtures: each row is kept at once, and the same command goes on with those that are missing."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from support.commands import assert_refusal

from benchmarks import mixtures, recipe_scores
from benchmarks.measure import read_results
from benchmarks.mixtures import Mixtures, measure
from benchmarks.tables import summarise_mixtures
from data_prep.common.files import write_json

PAIRS = {"accuracy": 0.5, "spread": 0.01, "pairs": 67, "data_sha256": "s", "chance": 0.5, "phenomena": {}}


def test_a_measurement_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, last = list[str](), 2

    def follow(command: Sequence[str], *_: object) -> int:
        if "train.py" in command[1]:
            trained.append(command[command.index("--phases.2.mix") + 1])
            if len(trained) > last:
                return 2
        if "run_pairs.py" in command[1]:
            write_json(Path(command[command.index("--out") + 1]) / "results.json", PAIRS)
        return 0

    def score(_: object, part: Any, *more: object) -> SimpleNamespace:
        return SimpleNamespace(examples=9, figures={"masked_loss": float(len(trained) + len(part.name))})

    parts = [SimpleNamespace(name=name) for name in ("books", "wiki")]
    monkeypatch.setattr(recipe_scores, "follow", follow)
    monkeypatch.setattr(mixtures, "ROOT", tmp_path)
    monkeypatch.setattr(mixtures, "score_shards", score)
    monkeypatch.setattr(mixtures, "summarise_training", lambda _: {})
    monkeypatch.setattr(mixtures, "StoredModel", SimpleNamespace(open=lambda _: None))
    read: Callable[..., Any] = lambda _: SimpleNamespace(parts=parts, fingerprint="f")  # noqa: E731
    monkeypatch.setattr(mixtures, "Corpora", SimpleNamespace(read=read))
    wanted, console = Mixtures(out=tmp_path / "kept.json"), Console(quiet=True)
    assert_refusal("train has ended with code 2", measure, wanted, console)
    assert len(read_results(tmp_path / "kept.json")["rows"]) == last
    last = 99
    measure(wanted, console)
    assert len(trained) == 7, "each once, and the failed one again"
    found = read_results(tmp_path / "kept.json")
    assert sorted((row["seed"], row["wiki"]) for row in found["rows"]) == [*product((1, 2), (20, 50, 80))]
    assert "{ wiki = 0.8, books = 0.20 }" in trained
    [table] = summarise_mixtures(found)
    assert table.rows[0] == ["80 : 20", "50.0 (50.0, 50.0)", "10.500 (9.000, 12.000)", "9.500 (8.000, 11.000)"]
