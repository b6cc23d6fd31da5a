"""An objective or an optimizer that a stranger adds is one file: trained with, saved, planned, exported and told of."""

import re
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from support.copies import copy_packages, run_entry
from support.pretraining_reference import random_rows
from support.training import Place, records
from torch import Tensor

from pretraining.architectures.declaration import make_shape
from pretraining.checkpoint.reading import list_parameter_sizes, read_weights
from pretraining.checkpoint.record import list_finished, read_record
from pretraining.objectives import declaration, ltr

EXAMPLE = dedent(re.findall(r"\n\n(    class Sums.*?)\n\n`make", declaration.__doc__ or "", re.DOTALL)[0])
"""The example of an objective, which its documentation says is all that has to be written."""
IMPORTS = """
from typing import NamedTuple
import numpy as np
from torch import Tensor
from pretraining.model.batch import pack
from pretraining.objectives.declaration import Figure, Objective

"""
OWN_HEAD = {
    "    correct: Tensor": "    correct: Tensor\n    ends: Tensor",
    '"language head"}': '"language head", "ends": "head of ends"}',
    "batch.labels))": 'batch.labels), model.head("ends")(seen).square().sum())',
    "losses.nats /": "(losses.nats + losses.ends) /",
    "    def sums(self": """    def build(self, shape):
        from torch import nn
        return {**super().build(shape), "ends": nn.Linear(shape.hidden, 1)}

    def parameters(self, shape):
        return super().parameters(shape) + shape.hidden + 1

    def exported_heads(self, shape):
        return ["masked_head"]

    def sums(self""",
}
"""Changes of the example: a head of its own, of which transformers knows nothing."""
OPTIMIZER = '''
"""Three averages; of matrices the first is turned towards an orthogonal one, which only a whole matrix has."""
from pretraining.optimizers.declaration import Optimizer

class Toy(Optimizer):
    title, summary = "Toy", "Toy"
    state = ("fast", "slow", "power")
    traffic = 50
    whole_matrices = True

    def update(self, role, weight, gradient, state, step, settings):
        state["fast"].lerp_(gradient, 0.1)
        state["slow"].lerp_(gradient, 0.01)
        state["power"].lerp_(gradient.square(), 0.05)
        turned = state["fast"] / (state["fast"].norm() + settings.epsilon)
        if role.kind == "matrix":
            for _ in range(3):
                turned = 1.5 * turned - 0.5 * turned @ (turned.T @ turned)
        return turned + state["slow"] / (state["power"].sqrt() + 1e-3)

OPTIMIZER = Toy()
'''
PLAN = ("--recipe", "bert_base_adam", "--check", "--ranks", "1", "--gpu", "a100-80")
TRAIN, WORDS = "pretraining/train.py", ("--objective.name", "left_to_right")


def test_the_example_of_an_objective_learns_what_ltr_learns() -> None:
    names: dict[str, Any] = {}
    exec(IMPORTS + EXAMPLE, names)
    rows, shape = random_rows([5, 9], 50), make_shape("tiny", 50).change_learning(objective="ltr", sees="before")
    model = declaration.build_model(shape.change_learning(pairs=False)).initialize(0).eval()
    found = []
    for kind in (names["OBJECTIVE"], ltr.OBJECTIVE):
        batch = kind.batch(rows)
        found.append(kind.losses(model, model.states_for_heads(batch), batch).nats)
    assert torch.equal(*found)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    objective = f'"""Every next piece from those before it."""{IMPORTS}{EXAMPLE}'
    for old, new in OWN_HEAD.items():
        assert objective.count(old) == 1
        objective = objective.replace(old, new)
    added = {"pretraining__objectives__left_to_right": objective, "pretraining__optimizers__toy": OPTIMIZER}
    return copy_packages(tmp_path_factory.mktemp("copy"), **added)


@pytest.mark.slow
def test_an_objective_is_trained_exported_and_told_of(copy: Path, place: Place) -> None:
    said = run_entry(copy, TRAIN, *place.command("run", *WORDS, "--phases.0.learning_rate", "1e-2"), ranks=2)
    run = place.folder / "run"
    steps, scores = records(run), records(run, "evaluation")
    for line in (*steps, *scores):
        assert "piece_loss" in line
        assert not [name for name in line if "mask" in name or "next" in name]
    assert steps[-1]["piece_loss"] < steps[0]["piece_loss"] - 0.1
    assert steps[0]["loss"] == steps[0]["piece_loss"]
    assert f"pieces {scores[-1]['piece_loss']:.4f}" in said
    assert "left out: ends, of which transformers knows nothing" in said
    card = (run / "export" / "README.md").read_text()
    assert "A BERT encoder with its language head, which predicts every piece from those before it" in card
    assert "| piece loss | " in card
    run_entry(copy, "pretraining/export.py", run, "--out", place.folder / "exported")
    anew = run_entry(copy, "pretraining/export.py", place.folder / "exported", "--out", place.folder / "anew")
    for output in (said, anew):
        assert "logits read back by Cloze and transformers agree" in output


@pytest.mark.slow
def test_an_objective_is_planned_with_its_own_predictions(copy: Path) -> None:
    words = (*PLAN, "--phases.0.micro_batch", "8")
    found = []
    for more in ((), WORDS):
        line = r"^ZeRO 1 \(this recipe\)(?: +[\d.]+){4} +([\d.]+)"
        said = run_entry(copy, TRAIN, *words, "--phases.1.micro_batch", "8", *more)
        found.append(float(re.findall(line, said, re.MULTILINE)[0]))
    pieces, share = 8 * 512, 511 / 512 - 0.15
    logits, head, last_layer = 2 * 30522, 8 * 768, 26 * 768  # bytes of a prediction: kernels keep one tensor of logits
    assert found[1] - found[0] == pytest.approx(pieces * share * (logits + head + last_layer) / 1e9, abs=0.02)


def weights_of(run: Path) -> dict[str, Tensor]:
    """The weights after a run, whose recipe this process cannot read: the optimizer is in the copy alone."""
    checkpoint = list_finished(run)[-1]
    return read_weights(checkpoint, list_parameter_sizes(read_record(checkpoint).shape))


def differences(one: Path, other: Path) -> list[float]:
    """The largest relative difference of each weight after two runs."""
    first, second = weights_of(one), weights_of(other)
    return [float((first[name] - second[name]).norm() / first[name].norm().clamp(min=1e-3)) for name in first]


@pytest.mark.slow
def test_an_optimizer_trains_alike_on_any_ranks_and_goes_on_on_others(copy: Path, place: Place) -> None:
    words = ("--optimizer.name", "toy", "--checkpoints.every", "3", "--checkpoints.keep", "9")
    for ranks in (1, 2):
        said = run_entry(copy, TRAIN, *place.command(f"on-{ranks}", *words), ranks=ranks)
        assert "; toy, fp32, ZeRO 1" in said
    one, two = place.folder / "on-1", place.folder / "on-2"
    assert max(differences(one, two)) < 1e-4
    stopped = place.folder / "stopped"
    shutil.copytree(two, stopped)
    for later in list_finished(stopped)[1:]:
        shutil.rmtree(later)
    files = {file.path.partition("-0")[0] for file in read_record(list_finished(stopped)[0]).files}
    assert files == {"weight", "fast", "slow", "power"}
    assert "continues after step 3" in run_entry(copy, TRAIN, *place.command("stopped", *words))
    assert max(differences(two, stopped)) < 1e-4
    assert all(torch.isfinite(weight).all() for weight in weights_of(stopped).values())
    assert "optimizer: Toy; betas" in (one / "export" / "README.md").read_text()


@pytest.mark.slow
def test_an_optimizer_is_planned_with_its_own_bytes(copy: Path) -> None:
    words = (*PLAN, "--optimizer.name")
    shares = {}
    for name in ("adamw", "toy"):
        said = run_entry(copy, TRAIN, *words, name)
        shares[name] = re.findall(r"^ZeRO 1 \(this recipe\) +[\d.]+ +[\d.]+ +([\d.]+)", said, re.MULTILINE)
    averages, whole = 4 * 110.1e6, (8 + 12) * 30528 * 768  # another average; the largest matrix with what moves it
    assert shares == {"adamw": ["1.32"], "toy": [f"{(3 * averages + averages + whole) / 1e9:.2f}"]}
