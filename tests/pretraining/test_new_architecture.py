"""An architecture that a stranger adds is one file, that of docs/architectures.md: all commands work with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from support.copies import copy_packages, run_entry
from support.finetuning import Toy, write_task
from support.training import FEW, Place, records

BAG = ("--model.architecture", "bag", "--model.segments", "2")
"""The data has pairs."""
TRAIN = "pretraining/train.py"
PARAMETERS = 229 * 32 + 2 * (32 * 32 + 3 * 32)
"""Of the pieces and two layers; the head reads the table of pieces."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/architectures.md").read_text(), re.DOTALL)
    return copy_packages(tmp_path_factory.mktemp("copy"), pretraining__architectures__bag=text)


def test_the_command_of_the_page_trains_it(copy: Path, place: Place) -> None:
    """It leaves out next sentences, for which the bag has no head, and needs no second segment."""
    page = (ROOT / "docs/architectures.md").read_text()
    [words] = re.findall(r"^python pretraining/train.py .*(--model.architecture bag .*)$", page, re.MULTILINE)
    said = run_entry(copy, TRAIN, *place.command("page", *words.split(), *FEW))
    assert "next sentences are left out: the model learns from masked pieces alone" in said
    assert json.loads((place.folder / "page/export/config.json").read_text())["segments"] == 1


def test_an_architecture_is_one_file(copy: Path, place: Place) -> None:
    said = run_entry(copy, TRAIN, *place.command("run", *BAG, *FEW))
    for line in (
        f"{PARAMETERS:,} parameters: 2 layers of 32, 229 pieces; adamw, fp32, ZeRO 1",
        "bag-of-words has no head for pairs: the model learns from masked pieces alone",
        f"exported {PARAMETERS:,} parameters; logits read back by Cloze agree exactly",
        "no class of transformers computes this model",
    ):
        assert line in said
    export = place.folder / "run/export"
    config = json.loads((export / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["hidden"]) == ("cloze-bag", ["ClozeForMaskedLM"], 32)
    assert "A bag-of-words encoder with its masked-language head, pre-trained" in (export / "README.md").read_text()
    assert {"words.weight", "layers.1.mix.bias"} <= load_file(export / "model.safetensors").keys()


@pytest.mark.slow
def test_it_is_planned_with_its_own_weights_and_activations(copy: Path) -> None:
    """One more layer takes what the file says, whatever the planner adds for other things."""
    sizes = ("--model.size", "bag", "--model.hidden", "2048", "--phases.0.micro_batch", "64", "--phases.1.micro_batch")
    words = ("--recipe", "bert_base_adam", "--check", "--ranks", "1", "--gpu", "a100-80", "--model.architecture", "bag")
    found = []
    for layers in (4, 12):
        said = run_entry(copy, TRAIN, *words, *sizes, "16", "--model.layers", layers)
        line = re.findall(r"^ZeRO 1 \(this recipe\) +(.+)$", said, re.MULTILINE)[0]
        found.append([float(number) for number in line.split()])
    h, pieces = 2048, 64 * 128
    more = [now - before for before, now in zip(*found, strict=True)]
    weights, gradients, optimizer = (8 * size * (h * h + 3 * h) / 1e9 for size in (2, 8, 12))
    activations = 8 * pieces * 2 * 6 * h / 1e9
    wanted = [weights, gradients, optimizer, 0.0, weights + gradients + optimizer + activations]
    assert more[:5] == pytest.approx(wanted, abs=0.02)


@pytest.mark.slow
def test_a_folder_of_it_is_read_scored_fine_tuned_and_asked(copy: Path, place: Place, toy: Toy) -> None:
    folder = place.folder
    run_entry(copy, TRAIN, *place.command("run", *BAG, "--evaluation.examples", "0"))
    export = folder / "run/export"
    run_entry(copy, "pretraining/export.py", export, "--out", folder / "anew")
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder / "anew", export))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    said = run_entry(copy, TRAIN, *place.command("more", "--init", export))  # the folder says what it is
    assert f"begins with {export}: 2 layers of 32, 229 pieces" in said
    assert records(folder / "more")[0]["loss"] < records(folder / "run")[0]["loss"] - 0.1

    scores = run_entry(copy, "pretraining/evaluate.py", export, "--data", place.data, "--json")
    last = records(folder / "run", "evaluation")[-1]
    assert json.loads(scores)["figures"]["masked_loss"] == pytest.approx(last["masked_loss"], abs=1e-4)

    task = write_task(toy, folder / "task")
    words = ("--model", export, "--recipe", task / "recipe.toml", "--out", folder / "tuned")
    learns = ("--learning_rate", "0.03", "--epochs", "8")
    assert "accuracy  dev 100.0" in run_entry(copy, "finetuning/run_task.py", task / "toy.toml", *words, *learns)
    (folder / "texts").write_text("the river of time\ntime of river the\nlong mountain\n")
    answers: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        asked = (folder / "tuned/toy", folder / "texts", "--dtype", dtype)
        said = run_entry(copy, "finetuning/predict.py", *asked)
        answers[dtype] = [json.loads(line) for line in said.splitlines()]
        assert [answer["label"] for answer in answers[dtype]] == ["wet", "wet", "dry"]
    refused = run_entry(copy, "finetuning/predict.py", *asked[:-1], "int8", code=2)
    assert 'not on cpu for bag-of-words here; take "auto"' in refused
    first, turned, _ = answers["fp32"]
    assert first["probabilities"] == pytest.approx(turned["probabilities"]), "a bag knows no order"
