"""The systems that BERT is compared with, by the real commands: trained, stopped and continued, and asked again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.base_models import write_bert
from support.faults import replace as put
from support.finetuning import Toy, fine_tune, launch, metrics, outcome, results, stop_at, write_toy
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well
from transformers import AutoModel

from data_prep.common.errors import UserError
from finetuning.prediction import load
from finetuning.running import kept

BILSTM = ["--bilstm.hidden", "16", "--bilstm.depth", "1"]


def assert_answers_again(toy: Toy, out: Path) -> None:
    """The folder that was written says of dev what it said when it was trained, to the last decimal that is written."""
    texts = [line.split("\t")[0] for line in (toy.data / "dev.tsv").read_text().splitlines()[1:]]
    lines = (out / "toy" / "predictions" / "predictions_dev.tsv").read_text().splitlines()[1:]
    said = [float(line.split("\t")[-1]) for line in lines]
    assert len({*said}) > 1, "the same of every text would say little"
    answers = load(out / "toy", "fp32")(texts)
    assert [[*answer["probabilities"].values()][-1] for answer in answers] == pytest.approx(said, abs=2e-6)


def assert_continues_and_answers(toy: Toy, *flags: str) -> str:
    """A run that is stopped is the straight one, on two ranks nearly so, and its model answers; what the first said."""
    straight, stopped = toy.command("straight", *flags), toy.command("stopped", *flags)
    said = assert_well(fine_tune(straight))
    assert_ended(launch(stopped, fault=partial(stop_at, 4)), 75, "after step 4, and saved")
    assert_well(fine_tune(stopped))
    assert outcome(toy.folder / "stopped") == outcome(toy.folder / "straight")
    assert_answers_again(toy, toy.folder / "straight")
    assert_well(fine_tune(toy.command("two", *flags), ranks=2))
    one, two = (losses(toy.folder / name) for name in ("straight", "two"))
    assert one == pytest.approx(two, rel=1e-4)
    return said


def losses(out: Path) -> list[float]:
    """All losses that a run has told."""
    (path,) = (out / "toy").glob("*/metrics.jsonl")
    steps = [record for record in metrics(path) if record["kind"] == "step"]
    return [record[name] for record in steps for name in ("loss", "language_loss") if name in record]


@pytest.mark.slow
def test_a_bilstm_on_top_is_stopped_continued_and_asked(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    assert_continues_and_answers(toy, *BILSTM)
    with pytest.raises((OSError, ValueError)):  # rather than an ordinary BERT
        AutoModel.from_pretrained(toy.folder / "straight" / "toy" / "model")


@pytest.mark.slow
def test_gpt_learns_its_language_too(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    one_way = replace(toy, model=write_bert(tmp_path / "ltr", VOCABULARY, objective="ltr"))
    assert_continues_and_answers(one_way, "--language_loss", "0.5")
    assert_well(fine_tune(one_way.command("without")))
    assert losses(toy.folder / "without")[0] != losses(toy.folder / "straight")[0]


@pytest.mark.slow
def test_two_encoders_of_elmo_stand_side_by_side(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    one_way = replace(toy, model=write_bert(tmp_path / "ltr", VOCABULARY, objective="ltr"))
    other_way = write_bert(tmp_path / "rtl", VOCABULARY, hidden=16, objective="rtl")
    mix = ["--features.layers", "mix", "--features.hidden", "16", "--backward", str(other_way)]
    said = assert_continues_and_answers(one_way, *mix)
    kept = sorted(path.name for path in (toy.folder / "straight" / "toy" / "activations").glob("*.arrow"))
    assert kept == ["dev.arrow", "test.arrow", "train.arrow"]
    assert "are kept in" in said
    said = assert_well(fine_tune(one_way.command("again", *mix, "--cache-gb", "0")))
    assert "more than --cache-gb 0 leaves: they are computed again in every epoch" in said
    assert losses(toy.folder / "again") == pytest.approx(losses(toy.folder / "straight"), rel=1e-5)
    write_bert(other_way, VOCABULARY, objective="rtl")
    with pytest.raises(UserError, match="is not the model that it learned on"):
        load(toy.folder / "straight" / "toy")


@pytest.mark.slow
def test_runs_side_by_side_share_what_is_kept_also_after_a_kill(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    mix = ["--features.layers", "mix", "--features.hidden", "16", "--seeds", "2"]
    command = toy.command("killed", *mix)
    assert launch(command, fault=kill_while_keeping).wait()[0].code == -signal.SIGKILL
    assert [*(toy.folder / "killed" / "toy" / "activations").glob("*.arrow")] == []
    said = assert_well(fine_tune([*command, "--search.jobs", "2"]))
    assert said.count("are kept in") == 1
    assert_well(fine_tune(toy.command("straight", *mix)))
    scores = [results(toy.folder / name)["runs"] for name in ("killed", "straight")]
    assert scores[0].keys() == scores[1].keys()
    assert len(scores[0]) == 2
    files = [
        (toy.folder / name / "toy" / "activations" / "train.arrow").read_bytes() for name in ("killed", "straight")
    ]
    assert files[0] == files[1]


def kill_while_keeping() -> None:
    """A fault: the process is killed when it has written a part of a file of activations."""
    write = kept.ActivationFile.write

    def write_or_die(*arguments: Any) -> Iterator[None]:
        yield next(write(*arguments))
        os.kill(os.getpid(), signal.SIGKILL)

    put(kept.ActivationFile, "write", write_or_die)
