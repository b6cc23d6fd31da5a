"""Runs of `ltr` and `rtl` by their commands: trained, gone on with, exported, read back, fine-tuned, asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.finetuning import Toy, fine_tune, outcome, results
from support.training import (
    CUT,
    Place,
    assert_same_curve,
    assert_well,
    train,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from finetuning import prediction
from pretraining import export
from pretraining.huggingface.folders import read_shape

WORDS = {
    name: ["--objective.name", name, "--checkpoints.every", "2", "--checkpoints.keep", "9"] for name in ("ltr", "rtl")
}


@pytest.fixture(scope="module", params=["ltr", "rtl"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(name: str, shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folder of "straight", a run of two ranks."""
    place = dataclasses.replace(shared, folder=tmp_path_factory.mktemp(name))
    assert_well(train(place.command("straight", *WORDS[name], "--phases.0.learning_rate", "1e-2")))
    return place


@pytest.mark.slow
def test_it_may_begin_with_a_model_that_saw_both_sides(name: str, trained: Place, straight: Path) -> None:
    """And with the first steps under ZeRO 3, where weights are gathered for every use, and layers computed twice."""
    zero = ["--parallel.zero", "3", *CUT, "--compute.checkpoint_activations", "true"]
    ways = [("begun", ["--phases.0.micro_batch", "6"]), ("begun under ZeRO 3", zero)]
    for run, more in ways:
        command = trained.command(run, *WORDS[name], "--init", straight / "export", *more)
        said = assert_well(train(command))
        assert "; left out: pooler, next-sentence head" in said
    first, second = (trained.folder / run for run, _ in ways)
    assert_same_curve(second, first, 1e-4)


@pytest.mark.slow
def test_an_export_is_what_it_says(name: str, trained: Place, tmp_path: Path) -> None:
    assert export.main([str(trained.folder / "straight"), "--out", str(tmp_path / "anew")]) == 0
    assert export.main([str(tmp_path / "anew"), "--out", str(tmp_path / "again")]) == 0
    config, card = (json.loads((tmp_path / "again" / "config.json").read_text()), (tmp_path / "again" / "README.md"))
    shape = read_shape(tmp_path / "again")
    assert (shape.learns.objective, shape.learns.pairs) == (name, False)
    assert shape.learns.sees == {"ltr": "before", "rtl": "after"}[name]
    if name == "rtl":
        assert config["model_type"] == "cloze-rtl"
        for kind in (AutoConfig, AutoModel, AutoModelForCausalLM):
            with pytest.raises(ValueError, match="cloze-rtl"):
                kind.from_pretrained(tmp_path / "again")
        assert "No class of transformers" in card.read_text()
        return
    assert (config["model_type"], config["is_decoder"]) == ("bert", True)
    assert "AutoModelForCausalLM" in card.read_text()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    model.eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "again")
    start = torch.tensor([[tokenizer.cls_token_id, 7]])
    text = model.generate(start, max_new_tokens=12, do_sample=False)
    assert len(text[0]) == 14 or int(text[0, -1]) == tokenizer.sep_token_id
    for end in range(2, len(text[0])):  # each is the likeliest after those before it
        with torch.inference_mode():
            assert int(model(text[:, :end]).logits[0, -1].argmax()) == int(text[0, end])


@pytest.mark.slow
def test_it_is_fine_tuned_one_way_without_being_told(name: str, trained: Place, toy: Toy) -> None:
    model = trained.folder / "straight" / "export"
    toy = dataclasses.replace(toy, model=model, folder=toy.folder)
    assert_well(fine_tune(toy.command("tuned")))
    assert_well(fine_tune(toy.command("two"), ranks=2))
    tuned = toy.folder / "tuned"
    assert results(tuned)["scores"] == results(toy.folder / "two")["scores"]
    folder = tuned / "toy" / "model"
    assert read_shape(folder).learns.sees == {"ltr": "before", "rtl": "after"}[name]
    assert json.loads((folder / "config.json").read_text())["model_type"] == f"cloze-{name}"
    with pytest.raises(ValueError, match=f"cloze-{name}"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    asked = prediction.load(folder)
    answers = asked([{"text": "a good film the plot"}, {"text": "a poor film the plot"}])
    assert answers[0]["probabilities"] != answers[1]["probabilities"]
    assert outcome(tuned)
