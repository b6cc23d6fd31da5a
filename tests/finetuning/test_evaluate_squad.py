"""`evaluate_squad.py` as a user types it: figures on standard output, what is odd on standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.squad import article, item, write_squad

from finetuning import evaluate_squad

Typed = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """The command in this process: its exit code, the figures and what was said."""

    def call(*arguments: object) -> tuple[int, Any, str]:
        code = evaluate_squad.main([*map(str, arguments)])
        printed, said = capsys.readouterr()
        return code, json.loads(printed) if printed else None, said

    return call


def test_a_process_prints_figures_alone(first: Path, tmp_path: Path) -> None:
    """On standard output, for programs that read them."""
    predictions = write(tmp_path / "p.json", {"a": "été!"})
    command = [sys.executable, str(ROOT / "finetuning/evaluate_squad.py"), str(first), str(predictions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"exact_match": 50.0, "f1": 50.0})
    assert "no answer for 1 id (b): counted as wrong" in done.stderr


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """SQuAD 1.1 with an accent, an article and several golds."""
    items = [item("a", "q", ["the Été", "Été de 1858"]), item("b", "q", ["1858"])]
    return write_squad(tmp_path / "dev-v1.1.json", [article("t", [("the Été de 1858", items)])])


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """SQuAD 2.0 with a question that has no answer."""
    items = [item("a", "q", ["Été"], True), item("b", "q", [], True)]
    return write_squad(tmp_path / "dev-v2.0.json", [article("t", [("the Été de 1858", items)])])


def test_version_1_counts_and_names_what_is_missing(typed: Typed, first: Path, tmp_path: Path) -> None:
    predictions = write(tmp_path / "p.json", {"a": "été!", "z1": "", "z2": "", "z3": "", "z4": ""})
    code, figures, said = typed(first, predictions)
    assert code == 0
    assert figures == {"exact_match": 50.0, "f1": 50.0}
    assert "no answer for 1 id (b): counted as wrong" in said
    assert "4 ids (z1, z2, z3, …) no question of" in said


def test_version_2_with_odds_has_best_thresholds(typed: Typed, second: Path, tmp_path: Path) -> None:
    predictions = write(tmp_path / "p.json", {"a": "the été", "b": "1858"})
    assert typed(second, predictions)[1]["exact"] == 50.0
    odds = write(tmp_path / "o.json", {"a": -3, "b": 0.5})
    out = tmp_path / "figures.json"
    code, figures, said = typed(second, predictions, "--null-odds", odds, "--na-prob-thresh", "0.25", "--out", out)
    assert (code, said) == (0, "")
    assert figures == json.loads(out.read_text())
    assert figures["exact"] == figures["NoAns_f1"] == figures["best_f1"] == 100.0
    assert figures["best_exact_thresh"] == -3
    assert typed(second, predictions, "--null-odds", odds)[1]["exact"] == 50.0  # 1.0 is the official threshold


def test_version_2_refuses_missing_predictions_and_odds(typed: Typed, second: Path, tmp_path: Path) -> None:
    code, figures, said = typed(second, write(tmp_path / "p.json", {"a": ""}))
    assert (code, figures) == (2, None)
    assert "p.json: no answer for 1 id (b) of" in said
    whole = write(tmp_path / "p.json", {"a": "", "b": ""})
    code, _, said = typed(second, whole, "--null-odds", write(tmp_path / "o.json", {"b": 1}))
    assert code == 2
    assert "o.json: no odds for 1 id (a) of" in said


def test_what_cannot_be_scored_is_refused(typed: Typed, first: Path, tmp_path: Path) -> None:
    predictions, garbage = write(tmp_path / "p.json", {"a": "", "b": ""}), tmp_path / "garbage"
    garbage.write_bytes(b"\x00{")
    for arguments, message in (
        ((garbage, predictions), "garbage: not a whole JSON file"),
        ((first, garbage), "garbage: not a whole JSON file"),
        ((first, tmp_path / "none.json"), "none.json: cannot be read: No such file"),
        ((first, first), "dev-v1.1.json: 'data'"),
        ((first, predictions, "--null-odds", predictions), "--null-odds: "),
        ((first, predictions, "--out", tmp_path / "p.json" / "out.json"), "out.json: cannot be written"),
    ):
        code, figures, said = typed(*arguments)
        assert (code, figures) == (2, None)
        assert said.startswith("error: ")
        assert message in said
