"""The benchmark of going on from a BERT: it runs to its end, and its figures are of the same held-out text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import write_wiki

from benchmarks.adapting import main


@pytest.mark.slow
def test_all_four_models_are_scored_on_the_same_text(tmp_path: Path) -> None:
    write_wiki(tmp_path / "wiki", documents=60)
    out = tmp_path / "adapting.json"
    sizes = ["--layers", "1", "--hidden", "64", "--vocab-size", "400", "--megabytes", "0.5", "--extend", "50"]
    budget = ["--base-steps", "4", "--steps", "4", "--batch", "8"]
    assert main(["--data", str(tmp_path), "--files", "wiki", "--out", str(out), *sizes, *budget]) == 0
    found = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    scores = found["scores"]
    assert list(scores) == ["before", "after", "after, with more words", "from scratch"]
    assert (
        scores["before"]["masked_pieces"] == scores["after"]["masked_pieces"] == scores["from scratch"]["masked_pieces"]
    )
    more = scores["after, with more words"]
    assert more["masked_pieces"] < scores["after"]["masked_pieces"], "the same text has fewer pieces"
    assert more["masked_characters"] == pytest.approx(scores["after"]["masked_characters"], rel=0.2)
    for each in scores.values():
        assert each["nats_a_character"] == pytest.approx(
            each["masked_loss"] * each["masked_pieces"] / each["masked_characters"], rel=1e-3
        )
