"""Every architecture by the commands that a user types: trained, stopped, exported, scored, fine-tuned, asked."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_main
from support.finetuning import Toy, Tune, write_task
from support.marks import slow
from support.training import CUT, FEW, Place, assert_goes_on, assert_same_curve, distance, records

from finetuning import predict, run_pairs
from pretraining import evaluate, export
from pretraining import train as train_entry
from pretraining.architectures.declaration import architectures

WORDS = {
    "bert": (),
    "roberta": ("--model.architecture", "roberta"),
    "electra": ("--model.architecture", "electra", "--objective.name", "rtd"),
    "gpt": ("--model.architecture", "gpt", "--objective.name", "ltr"),
    "modern": ("--model.architecture", "modern", "--model.window", "8"),
}
"""What names an architecture, and an objective that suits it; the window is narrower than most sequences."""
OTHERS = pytest.mark.parametrize("name", ["modern", *(slow(name) for name in WORDS if name not in ("bert", "modern"))])
"""Those of which no other file of this folder tells; ModernBERT, which differs most, stands for them every day."""
SAVES = ("--checkpoints.every", "3", "--checkpoints.keep", "9")
WAYS = {
    "plain": (),
    "ZeRO 3": ("--parallel.zero", "3", *CUT),
    "bf16": ("--precision.dtype", "bf16"),
    "computed again": ("--compute.checkpoint_activations", "true"),
    "LAMB": ("--optimizer.name", "lamb"),
    "Muon": ("--optimizer.name", "muon"),
    "masks drawn anew": ("--objective.masks", "dynamic", "--objective.rate", "0.4", "--objective.last_rate", "0.1"),
}
TRIED = [
    *((name, way) for name in ("gpt", "modern") for way in WAYS if name == "modern" or way != "masks drawn anew"),
    *((name, way) for name in ("electra", "roberta") for way in ("plain", "ZeRO 3")),
    ("electra", "Muon"),
]
"""RoBERTa and ELECTRA have the layers of BERT, whose ways are in test_stops.py and test_same_curve.py; ELECTRA has a
matrix besides, between the embeddings and the layers."""
FIGURES = ("masked_loss", "piece_loss")
"""The loss of one piece, by the objectives here."""


@pytest.fixture(scope="module")
def unpaired(shared: Place, unpaired_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Shards without pairs: only BERT of these has a head for them."""
    return dataclasses.replace(shared, data=unpaired_data, folder=tmp_path_factory.mktemp("architectures"))


def train_once(place: Place, name: str, *more: str, ranks: int = 2) -> Path:
    """A run that nothing happens to, unless there is one."""
    run = place.folder / f"{name} on {ranks} {' '.join(more)}".strip().replace("/", "")
    if not run.exists():
        said = place.train(run, *WORDS[name], *SAVES, *more, ranks=ranks)
        assert "logits read back by Cloze and transformers agree to" in said
    return run


def find_loss(record: dict[str, Any]) -> float:
    (found,) = (record[figure] for figure in FIGURES if figure in record)
    return float(found)


def test_every_architecture_is_here() -> None:
    assert WORDS.keys() == architectures().keys()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), TRIED)
def test_every_way_to_train_goes_on_and_is_the_same_on_other_ranks(
    name: str, way: str, unpaired: Place, place: Place
) -> None:
    given = dataclasses.replace(unpaired, folder=place.folder)
    straight = train_once(given, name, *WAYS[way])
    assert way != "plain" or find_loss(records(straight)[-1]) < find_loss(records(straight)[0])
    assert_goes_on(given, (*WORDS[name], *SAVES, *WAYS[way]), straight, 3e-3 if way == "bf16" else 1e-4)
    if way in ("ZeRO 3", "computed again"):
        assert_same_curve(straight, train_once(unpaired, name), 1e-4)


@pytest.fixture
def exported(name: str, unpaired: Place) -> Path:
    """The folder that a run has exported."""
    return train_once(unpaired, name) / "export"


@OTHERS
def test_an_export_is_fine_tuned_and_asked(name: str, exported: Path, toy: Toy, tune: Tune) -> None:
    """It answers rows of dev, all of which it knows; layers without an 8-bit form say so."""
    task, out = write_task(toy, toy.folder / "task"), toy.folder / "tuned"
    words = ("--model", exported, "--recipe", task / "recipe.toml", "--learning_rate", "0.01", "--out", out)
    assert "accuracy  dev 100.0" in tune([task / "toy.toml", *words, "--epochs", "6"])
    (toy.folder / "texts").write_text("the the river\nof of mountain\nlittle the river\n")
    for dtype in ("fp32", "bf16", "int8"):
        asked = (predict.main, out / "toy", toy.folder / "texts", "--dtype", dtype, "--out", toy.folder / dtype)
        if dtype == "int8" and name not in ("roberta", "electra"):
            assert f"not on cpu for {architectures()[name].title} here" in run_main(*asked, code=2)
            continue
        run_main(*asked)
        answers = [json.loads(line) for line in (toy.folder / dtype).read_text().splitlines()]
        assert [answer["label"] for answer in answers] == ["wet", "dry", "wet"]


@OTHERS
def test_a_run_begins_with_an_export_of_its_architecture(
    name: str, exported: Path, unpaired: Place, place: Place
) -> None:
    """The folder says what it is; the weights are those of the run to the last bit, and so is what is exported anew."""
    given = dataclasses.replace(unpaired, folder=place.folder)
    objective = WORDS[name][2:] if name in ("gpt", "electra") else ()
    still = (*FEW, "--phases.0.learning_rate", "1e-30", "--evaluation.examples", "25")
    said = given.train("more", *objective, "--init", exported, *still, ranks=1)
    assert f"begins with {exported}: 2 layers of 32, 229 pieces" in said
    before, after = (records(run, "evaluation")[-1] for run in (exported.parent, place.folder / "more"))
    if name == "electra":
        assert "anew: generator" in said
    else:
        assert find_loss(after) == pytest.approx(find_loss(before), rel=1e-6)
    assert distance(place.folder / "more", exported.parent) == 0
    run_main(export.main, exported, "--out", place.folder / "anew")
    anew, wanted = (folder / "model.safetensors" for folder in (place.folder / "anew", exported))
    assert anew.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize("name", [slow("electra")])
def test_replaced_pieces_are_scored_on_data_alone(name: str, exported: Path, unpaired: Place, tmp_path: Path) -> None:
    """By the run, which has the generator. No sentence is scored, and nothing is filled in."""
    run, data = exported.parent, ("--data", unpaired.data, "--length", "64", "--examples", "25")
    last, found = records(run, "evaluation")[-1], json.loads(run_main(evaluate.main, run, *data, "--json"))["figures"]
    assert {"detection_loss", "detected", "false_alarms", "masked_loss"} <= found.keys()
    assert found == pytest.approx({figure: last[figure] for figure in found}, rel=1e-4)
    said = run_main(evaluate.main, exported, *data, code=2)
    assert "has no generator, with which it was pre-trained: name the run of its pre-training" in said
    (tmp_path / "pairs.tsv").write_text("good\tbad\nthe river\triver the\n")
    for model in (run, exported):
        pairs = (run_pairs.main, "--model", model, "--pairs", tmp_path / "pairs.tsv", "--out", tmp_path / "out")
        for asked in (pairs, (evaluate.main, model, "--fill", "the [MASK]")):
            said = run_main(*asked, code=2)
            assert f"{model}: finds replaced pieces, so it says of no piece how likely it is" in said, name


@pytest.mark.parametrize("name", ["modern", *map(slow, ("roberta", "gpt"))])
def test_an_export_is_scored_as_its_run(name: str, exported: Path, unpaired: Place, tmp_path: Path) -> None:
    """On the data that is held out, and on minimal pairs, by checkpoint and folder."""
    pairs, run = tmp_path / "pairs.tsv", exported.parent
    lines = [f"the river {word} was long\tlong was {word} river the\n" for word in "of and to in is that it".split()]
    pairs.write_text("good\tbad\n" + "".join(lines))
    scores, found = find_loss(records(run, "evaluation")[-1]), []
    for number, model in enumerate((run, exported)):
        words = (model, "--data", unpaired.data, "--length", "64", "--examples", "25", "--json")
        assert find_loss(json.loads(run_main(evaluate.main, *words))["figures"]) == pytest.approx(scores, rel=1e-4)
        out = tmp_path / str(number)
        run_main(run_pairs.main, "--model", model, "--pairs", pairs, "--out", out)
        found.append(json.loads((out / "results.json").read_text())["accuracy"])
    assert found[0] == found[1]


@pytest.mark.usefixtures("leaves_group")
@OTHERS
def test_a_run_is_planned(name: str, unpaired: Place) -> None:
    """With its data, and with its published size on GPUs elsewhere."""
    own = unpaired.command("planned", *WORDS[name], "--check")
    assert "vocabulary 229; fp32 on 1 rank, ZeRO 1, adamw" in run_main(train_entry.main, *own)
    size = next(iter(architectures()[name].sizes))
    words = ("--recipe", "bert_base_adam", *WORDS[name], "--model.size", size, "--check", "--gpu", "a100-80")
    assert "ZeRO 1 (this recipe)" in run_main(train_entry.main, *words, "--ranks", "8")
