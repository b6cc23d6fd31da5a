"""Numbers on a scale of their own are learned, scored, exported and answered on it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.finetuning import WORDS, Toy, call, results, sentences, write_rows, write_toy

from data_prep.common.arrays import Array
from finetuning.prediction import FineTuned, load

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
