"""Models and settings that do not fit together are refused with the cure, before anything is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from safetensors.torch import load_file
from support.base_models import swapped, write_bert
from support.finetuning import Toy, call, write_toy
from support.tasks import VOCABULARY

from pretraining.huggingface.folders import WEIGHTS
from pretraining.huggingface.weights_file import write_weights

pytestmark = pytest.mark.usefixtures("leaves_group")
MIX = ("--features.layers", "mix")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A toy task, whose model `mlm` stands beside others of the same and of another vocabulary."""
    folder = tmp_path_factory.mktemp("fit")
    for name in ("ltr", "rtl"):
        write_bert(folder / name, VOCABULARY, objective=name)
    write_bert(folder / "other", swapped(VOCABULARY, 10, 11), objective="rtl")
    write_bert(folder / "short", VOCABULARY, positions=40, objective="rtl")
    write_bert(folder / "deep", VOCABULARY, objective="rtl", layers=3)
    return write_toy(folder)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("model", ["--features.layers", "concat-last-four"], "has 2 layers; take last or weighted-all"),
        ("ltr", ["--backward", "rtl"], "stands beside another model as frozen features; add --features.layers mix"),
        ("ltr", ["--backward", "other", *MIX], "has another vocabulary than"),
        ("ltr", ["--backward", "short", *MIX], "short has 40 positions; take --length 40"),
        ("ltr", ["--backward", "deep", *MIX], "deep: has 3 layers,"),
        ("model", ["--language_loss", "0.5"], "sees those after it, which are to be predicted; name a model that was"),
        ("rtl", ["--language_loss", "0.5"], "sees those after it"),
        ("ltr", ["--language_loss", "-1"], "language_loss"),
        ("ltr", ["--language_loss", "0.5", *MIX], "frozen encoders do not learn; leave it out, or features.layers"),
        (
            "model",
            ["--bilstm.hidden", "7"],
            "bilstm.hidden = 7: one half is for each direction; take an even number, as 8",
        ),
        ("model", ["--bilstm.hidden", "8", *MIX], "frozen features have a BiLSTM already"),
        ("model", ["--cache-gb", "-1"], "features.cache_gb"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: str, flags: list[str], message: str, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(toy.folder / flag) if (toy.folder / flag).is_dir() else flag for flag in flags]
    assert call("run_task", replace(toy, model=toy.folder / model).command("out", *flags)) == 2
    assert message in capsys.readouterr().err
    assert not (toy.folder / "out").exists()


def test_a_head_that_is_not_there_cannot_learn_on(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_bert(toy.folder / "bare", VOCABULARY, objective="ltr")
    weights = {name: weight for name, weight in load_file(bare / WEIGHTS).items() if name.startswith("bert.")}
    write_weights(weights, bare / WEIGHTS)
    assert call("run_task", replace(toy, model=bare).command("out", "--language_loss", "0.5")) == 2
    assert "bare has no language head; name the run or the export of its pre-training" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "backward", "said"), [("model", "rtl", True), ("ltr", "rtl", False)])
def test_unusual_pairs_are_named(
    model: str, backward: str, said: bool, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--backward", str(toy.folder / backward), *MIX, "--check"]
    assert call("run_task", replace(toy, model=toy.folder / model).command("out", *flags)) == 0
    told = "a piece sees those on both sides of it; usual beside another model is one that sees those before it"
    assert (told in capsys.readouterr().out) == said


def test_results_do_not_go_beside_the_second_model(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    second = toy.folder / "rtl"
    flags = ["--backward", str(second), *MIX]
    assert call("run_task", replace(toy, model=toy.folder / "ltr").command(second, *flags)) == 2
    assert f"is --backward {second}, which is read" in capsys.readouterr().err


def test_nothing_begins_with_a_model_with_a_bilstm(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    folder = toy.folder / "read"
    folder.mkdir()
    (folder / "task.json").write_text('{"bilstm": {"hidden": 8}}')
    assert call("run_task", replace(toy, model=folder).command("out", "--evaluate")) == 2
    assert "is scored in its own training; predict.py asks it more" in capsys.readouterr().err


def test_a_bilstm_that_does_not_fit_into_memory_is_told(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run_task", toy.command("wide", "--bilstm.hidden", "2000000")) == 2
    assert "does not fit into memory; take a smaller model, or a narrower" in capsys.readouterr().err
