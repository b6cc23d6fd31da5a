"""Files of minimal pairs: how their groups are told apart, what is left out, and what the usual one may be called."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.base_models import write_bert
from support.tasks import VOCABULARY

from finetuning import run_pairs
from finetuning.session import minimal_pairs

LONG = "film " * 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("pairs") / "model", VOCABULARY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes most of the time of a few pairs: the chart, and how fast this machine is."""
    monkeypatch.setattr(minimal_pairs, "draw", lambda *_: [])
    monkeypatch.setattr(minimal_pairs, "measure_flops", lambda *_: 1e12)


def score(model: Path, folder: Path, rows: Sequence[tuple[str, ...]]) -> tuple[int, Any]:
    """Scores pairs of phenomena and paradigms, each perhaps with its own good sentence; the code and the results."""
    lines = [dict(zip(("phenomenon", "paradigm", "good"), row, strict=False)) for row in rows]
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"good": "a good film", "bad": "a bad film", **line}) + "\n" for line in lines))
    code = run_pairs.main(["--model", str(model), "--pairs", str(pairs), "--out", str(folder / "out")])
    found = folder / "out" / "results.json"
    return code, json.loads(found.read_text()) if found.exists() else None


def table(said: str) -> list[list[str]]:
    """The rows of the table: what a group is called, and how many pairs it has."""
    rows = [line.split() for line in said.splitlines() if "±" in line]
    return [[row[0], row[-1]] for row in rows]


def counts(groups: dict[str, Any]) -> dict[str, int]:
    return {name: group["pairs"] for name, group in groups.items()}


def test_paradigms_of_one_name_are_told_apart_by_their_phenomena(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("x", "p"), ("x", "p"), ("y", "p"), ("y", "q"), ("", "")]
    code, found = score(model, tmp_path, rows)
    assert code == 0
    assert (tmp_path / "out" / "pairs.png").exists()
    assert counts(found["phenomena"]) == {"x": 2, "y": 2, "": 1}
    assert counts(found["paradigms"]) == {"x: p": 2, "y: p": 1, "q": 1, "": 1}
    shown = [["x", "2"], ["p", "2"], ["y", "2"], ["p", "1"], ["q", "1"], ["(none", "1"], ["all", "5"]]
    assert table(capsys.readouterr().out) == shown


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([("", ""), ("", "")], ["all"]),
        ([("x", ""), ("y", "")], ["x", "y", "all"]),
        ([("", "p"), ("", "")], ["(none", "p", "(none", "all"]),
    ],
)
def test_groups_without_names_are_shown_beside_others(
    rows: list[tuple[str, ...]],
    shown: list[str],
    model: Path,
    tmp_path: Path,
    quick: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert score(model, tmp_path, rows)[0] == 0
    assert [name for name, _ in table(capsys.readouterr().out)] == shown


def test_pairs_that_are_too_long_are_named_before_scoring(
    model: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = score(model, tmp_path, [("x", "p"), ("y", "q", LONG)])
    assert (code, found["too_long"], counts(found["paradigms"])) == (0, 1, {"p": 1})
    said = capsys.readouterr().out
    assert said.index(f"    left out: {LONG[:100]}…\n") < said.index("100%")


def test_pairs_of_which_all_are_too_long_leave_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(model, tmp_path, [("x", "p", LONG)] * 2) == (2, None)
    assert "none of its 2 pairs says anything" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_usual_pairs_are_found_compressed_or_not(
    model: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data" / "pairs"
    folder.mkdir(parents=True)
    command = ["--model", str(model), "--out", str(tmp_path / "out")]
    assert run_pairs.main(command) == 2
    assert "blimp.jsonl.xz" in capsys.readouterr().err
    pair = json.dumps({"good": "a good film", "bad": "a bad film"}).encode()
    (folder / "blimp.jsonl.xz").write_bytes(b"not read")
    (folder / "blimp.jsonl.gz").write_bytes(gzip.compress(pair))
    assert run_pairs.main(command) == 0
    assert "1 pairs of data/pairs/blimp.jsonl.gz" in capsys.readouterr().out
