"""The systems that BERT is compared with, by the real commands: trained, stopped and continued, and asked again; and
numbers on a scale of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.base_models import write_bert
from support.commands import refusal
from support.finetuning import (
    WORDS,
    Toy,
    call,
    fine_tune,
    launch,
    metrics,
    outcome,
    results,
    sentences,
    stop_at,
    write_rows,
    write_toy,
)
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well
from transformers import AutoModel

from data_prep.common.arrays import Array
from finetuning import predict
from finetuning.prediction import FineTuned, load

BILSTM = ["--bilstm.hidden", "16", "--bilstm.depth", "1"]
MIX = ["--features.layers", "mix", "--features.hidden", "16"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A task, and models that see on both sides of a piece, `model`, and on one side of it, `ltr` and `rtl`."""
    folder = tmp_path_factory.mktemp("systems")
    write_bert(folder / "ltr", VOCABULARY, objective="ltr")
    write_bert(folder / "rtl", VOCABULARY, hidden=16, objective="rtl")
    return write_toy(folder)


def one_way(toy: Toy) -> Toy:
    return replace(toy, model=toy.folder / "ltr")


def assert_answers_again(toy: Toy, out: Path) -> None:
    """predict.py says of dev what the model said when it was trained, to the last decimal that is written."""
    texts = [line.split("\t")[0] for line in (toy.data / "dev.tsv").read_text().splitlines()[1:]]
    lines = (out / "toy" / "predictions" / "predictions_dev.tsv").read_text().splitlines()[1:]
    said = [float(line.split("\t")[-1]) for line in lines]
    assert len({*said}) > 1, "the same of every text would say little"
    asked, answers = out / "asked.txt", out / "answers.jsonl"
    asked.write_text("".join(f"{text}\n" for text in texts))
    command = [out / "toy", asked, "--out", answers, "--dtype", "fp32"]
    assert predict.main([str(word) for word in command]) == 0
    found = [json.loads(line)["probabilities"] for line in answers.read_text().splitlines()]
    assert [[*each.values()][-1] for each in found] == pytest.approx(said, abs=2e-6)


def assert_continues_and_answers(toy: Toy, name: str, *flags: str) -> tuple[Path, str]:
    """A run that is stopped is the straight one, on two ranks nearly so, and its model answers; where the straight one
    lies, and what it said."""
    straight, stopped, two = (toy.folder / f"{name}-{kind}" for kind in ("straight", "stopped", "two"))
    first, to_stop = launch(toy.command(straight, *flags)), toy.command(stopped, *flags)
    halted, of_two = launch(to_stop, fault=partial(stop_at, 4)), launch(toy.command(two, *flags), ranks=2)
    said = assert_well(first.wait())
    assert_ended(halted, 75, "after step 4, and saved")
    assert_well(of_two.wait())
    assert_well(fine_tune(to_stop))
    assert outcome(stopped) == outcome(straight)
    assert_answers_again(toy, straight)
    assert losses(straight) == pytest.approx(losses(two), rel=1e-4)
    return straight, said


def losses(out: Path) -> list[float]:
    """All losses that a run has told."""
    (path,) = (out / "toy").glob("*/metrics.jsonl")
    steps = [record for record in metrics(path) if record["kind"] == "step"]
    return [record[name] for record in steps for name in ("loss", "language_loss") if name in record]


@pytest.mark.slow
def test_a_bilstm_on_top_is_stopped_continued_and_asked(toy: Toy) -> None:
    out, _ = assert_continues_and_answers(toy, "bilstm", *BILSTM)
    with pytest.raises((OSError, ValueError)):  # rather than an ordinary BERT
        AutoModel.from_pretrained(out / "toy" / "model")


@pytest.mark.slow
def test_gpt_learns_its_language_too(toy: Toy) -> None:
    without = launch(one_way(toy).command("gpt-without"))
    out, _ = assert_continues_and_answers(one_way(toy), "gpt", "--language_loss", "0.5")
    assert_well(without.wait())
    assert losses(toy.folder / "gpt-without")[0] != losses(out)[0]


@pytest.mark.slow
def test_two_encoders_of_elmo_stand_side_by_side(toy: Toy) -> None:
    other_way = toy.folder / "rtl"
    mix = [*MIX, "--backward", str(other_way)]
    again = launch(one_way(toy).command("elmo-again", *mix, "--features.cache_gb", "0"))
    out, said = assert_continues_and_answers(one_way(toy), "elmo", *mix)
    assert "and are computed once" in said
    assert "more than --features.cache_gb 0: they are computed again in every epoch" in assert_well(again.wait())
    assert losses(toy.folder / "elmo-again") == pytest.approx(losses(out), rel=1e-5)
    write_bert(other_way, VOCABULARY, objective="rtl")
    assert "is not the model that it learned on" in refusal(load, out / "toy")


@pytest.mark.slow
def test_runs_one_after_another_share_what_is_kept(toy: Toy) -> None:
    both, alone = (toy.command(out, *MIX, "--search.jobs", "1") for out in ("kept-both", "kept-alone"))
    said = assert_well(fine_tune([*both, "--seeds", "2"]))
    assert said.count("and are computed once") == 1
    assert_well(fine_tune([*alone, "--seed", "2"]))
    second = [results(toy.folder / out)["runs"]["lr0.003-seed2"]["score"] for out in ("kept-both", "kept-alone")]
    assert second[0] == second[1]


# Numbers on a scale of their own


pytestmark = pytest.mark.usefixtures("leaves_group")
YEARS = {"good": 1912, "bad": 1776}


def write_years(folder: Path) -> Toy:
    """The toy task with the year of a text, which its words tell but for some noise."""
    toy, draw = write_toy(folder), random.Random(2)
    (folder / "toy.toml").write_text((folder / "toy.toml").read_text().replace("classes", "score"))
    kinds = {word: kind for kind, words in WORDS.items() for word in words}
    for name, count in (("train", 160), ("dev", 24)):
        texts = [text for text, _ in sentences(draw, count)]
        years = [YEARS[next(kinds[word] for word in text.split() if word in kinds)] for text in texts]
        rows = [(text, str(year + draw.randint(-9, 9))) for text, year in zip(texts, years, strict=True)]
        write_rows(folder / f"{name}.tsv", rows)
    return toy


def years_said(model: FineTuned, texts: Sequence[str]) -> Array:
    return np.array([answer["score"] for answer in model(texts)])


@pytest.mark.slow
def test_years_are_learned_and_exported_as_years(tmp_path: Path) -> None:
    toy = write_years(tmp_path / "toy")
    assert call("run_task", toy.command("out", "--epochs", "20")) == 0
    told = results(toy.folder / "out")
    assert told["scores"]["dev"]["pearson"] > 0.9
    assert not told["degenerate"]
    folder = toy.folder / "out" / "toy" / "model"
    rows = [line.split("\t") for line in (toy.data / "dev.tsv").read_text().splitlines()[1:]]
    texts, right = [text for text, _ in rows], np.array([float(year) for _, year in rows])
    ours = years_said(load(folder, "fp32"), texts)
    assert np.abs(ours - right).mean() < 30
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = theirs(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert logits.tolist() == pytest.approx(ours, abs=0.01)
    in_bf16 = years_said(load(folder, "bf16", "cpu"), texts)
    assert in_bf16 == pytest.approx(ours, abs=3)
    assert (in_bf16 % 1 != 0).any()  # where the head is in 16 bits, too, there are no such years
