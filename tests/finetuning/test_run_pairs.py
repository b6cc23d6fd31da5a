"""Files of minimal pairs: how their groups are told apart, what is left out, and what the usual one may be called."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.base_models import write_bert
from support.commands import run_main
from support.tasks import VOCABULARY

from finetuning import run_pairs

LONG = "film " * 80
PAIR = {"good": "a good film", "bad": "a bad film"}
Score = Callable[..., str]
"""Scores pairs of phenomena and paradigms, each perhaps with its own good sentence; returns what is said."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("pairs") / "model", VOCABULARY)


@pytest.fixture
def score(model: Path, tmp_path: Path) -> Score:
    def run(rows: Sequence[tuple[str, ...]], out: str = "out", code: int = 0) -> str:
        lines = [dict(zip(("phenomenon", "paradigm", "good"), row, strict=False)) for row in rows]
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text("".join(json.dumps({**PAIR, **line}) + "\n" for line in lines))
        return run_main(run_pairs.main, "--model", model, "--pairs", pairs, "--out", tmp_path / out, code=code)

    return run


def table(said: str) -> list[list[str]]:
    """The rows of the table: what a group is called, and how many pairs it has."""
    rows = [line.split() for line in said.splitlines() if "±" in line]
    return [[row[0], row[-1]] for row in rows]


def counts(folder: Path, groups: str) -> dict[str, int]:
    found = json.loads((folder / "out" / "results.json").read_text())[groups]
    return {name: group["pairs"] for name, group in found.items()}


def test_paradigms_of_one_name_are_told_apart_by_their_phenomena(score: Score, tmp_path: Path) -> None:
    said = score([("x", "p"), ("x", "p"), ("y", "p"), ("y", "q"), ("", "")])
    assert counts(tmp_path, "phenomena") == {"x": 2, "y": 2, "": 1}
    assert counts(tmp_path, "paradigms") == {"x: p": 2, "y: p": 1, "q": 1, "": 1}
    shown = [["x", "2"], ["p", "2"], ["y", "2"], ["p", "1"], ["q", "1"], ["(none", "1"], ["all", "5"]]
    assert table(said) == shown


def test_groups_without_names_are_shown_beside_others(score: Score) -> None:
    assert table(score([("", ""), ("", "")], "alone")) == [["all", "2"]]
    assert [name for name, _ in table(score([("", "p"), ("", "")]))] == ["p", "(none", "all"]


def test_pairs_that_are_too_long_are_named_before_scoring(score: Score, tmp_path: Path) -> None:
    assert "none of its 2 pairs says anything" in score([("x", "p", LONG)] * 2, code=2)
    assert not (tmp_path / "out").exists()
    said = score([("x", "p"), ("y", "q", LONG)])
    assert counts(tmp_path, "paradigms") == {"p": 1}
    assert said.index("pieces in a sentence: 1; they are left out") < said.index("100%")


def test_the_usual_pairs_are_found_compressed_or_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "data" / "pairs").mkdir(parents=True)
    command = ["--model", model, "--out", tmp_path / "out"]
    assert "blimp.jsonl.xz" in run_main(run_pairs.main, *command, code=2)
    (folder / "blimp.jsonl.xz").write_bytes(b"not read")
    (folder / "blimp.jsonl.gz").write_bytes(gzip.compress(json.dumps(PAIR).encode()))
    assert "1 pairs of data/pairs/blimp.jsonl.gz" in run_main(run_pairs.main, *command)
