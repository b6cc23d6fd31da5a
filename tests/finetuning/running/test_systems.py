"""The systems that BERT is compared with, by the real commands: trained, stopped and continued, and asked again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from support.finetuning import Toy, fine_tune, launch, outcome, results, stop_at, write_toy
from support.training import assert_ended, assert_well

from finetuning.prediction import load

BILSTM = ["--bilstm.hidden", "16", "--bilstm.depth", "1"]


def assert_answers_again(toy: Toy, out: Path) -> None:
    """The folder that was written says of dev what it said when it was trained, to the last decimal that is written."""
    texts = [line.split("\t")[0] for line in (toy.data / "dev.tsv").read_text().splitlines()[1:]]
    lines = (out / "toy" / "predictions" / "predictions_dev.tsv").read_text().splitlines()[1:]
    said = [float(line.split("\t")[-1]) for line in lines]
    assert len({*said}) > 1, "the same of every text would say little"
    answers = load(out / "toy", "fp32")(texts)
    assert [[*answer["probabilities"].values()][-1] for answer in answers] == pytest.approx(said, abs=2e-6)


@pytest.mark.slow
def test_a_bilstm_on_top_is_stopped_continued_and_asked(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    straight, stopped = toy.command("straight", *BILSTM), toy.command("stopped", *BILSTM)
    assert_well(fine_tune(straight))
    assert_ended(launch(stopped, fault=partial(stop_at, 4)), 75, "after step 4, and saved")
    assert_well(fine_tune(stopped))
    assert outcome(toy.folder / "stopped") == outcome(toy.folder / "straight")
    assert_answers_again(toy, toy.folder / "straight")
    assert not (toy.folder / "straight" / "toy" / "model" / "config.json").exists()
    assert_well(fine_tune(toy.command("two", *BILSTM), ranks=2))
    one, two = (results(toy.folder / name)["score"] for name in ("straight", "two"))
    assert one == pytest.approx(two, abs=1e-5)
