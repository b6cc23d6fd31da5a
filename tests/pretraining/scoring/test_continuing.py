"""Texts that a model continues, beside generation of transformers from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.base_models import write_bert
from support.commands import run_main
from support.transformers_models import PIECES
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.vocabulary.kinds.wordpiece import WordPiece
from pretraining import evaluate

TEXT = "word1 Word7 xyz"


def test_a_text_is_continued_as_by_transformers(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "ltr", WordPiece(PIECES, cased=False), objective="ltr")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :-1]
    words = [str(folder), "--continue", TEXT, "--pieces", "9", "--json"]
    found = json.loads(run_main(evaluate.main, *words))["continuation"]
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    expected = theirs[0, 1:].tolist()
    expected = expected[: expected.index(tokenizer.sep_token_id)] if tokenizer.sep_token_id in expected else expected
    assert len(expected) > ids.shape[1]
    assert found == WordPiece(PIECES, cased=False).spell(expected)
    drawn = []
    for seed in (1, 1, 2):
        drawn.append(json.loads(run_main(evaluate.main, *words, "--temperature", "5", "--seed", seed))["continuation"])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith("word1 word7 xyz")


@pytest.mark.parametrize(
    ("objective", "text", "reason"),
    [
        ("mlm", TEXT, "predicts masked pieces; name one that predicts the piece after"),
        ("rtl", TEXT, "name one that predicts the piece after"),
        ("ltr", "word1 " * 70, "71 pieces, and"),
    ],
)
def test_what_cannot_be_continued_is_refused(objective: str, text: str, reason: str, tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "model", WordPiece(PIECES, cased=False), objective=objective)
    assert reason in run_main(evaluate.main, folder, "--continue", text, code=2)
