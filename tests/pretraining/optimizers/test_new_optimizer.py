"""An optimizer that a stranger adds is one file: trained with, saved, resumed on other ranks, planned."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from support.copies import copy_packages, run_entry
from support.training import Place
from torch import Tensor

from pretraining.checkpoint.reading import list_parameter_sizes, read_weights
from pretraining.checkpoint.record import list_finished, read_record

TOY = '''
"""Three averages; of matrices the first is turned towards an orthogonal one, which only a whole matrix has."""
from pretraining.optimizers.declaration import Optimizer

class Toy(Optimizer):
    title, summary = "Toy", "Toy"
    state = ("fast", "slow", "power")
    traffic = 50
    whole_matrices = True

    def update(self, name, weight, gradient, state, step, settings):
        state["fast"].lerp_(gradient, 0.1)
        state["slow"].lerp_(gradient, 0.01)
        state["power"].lerp_(gradient.square(), 0.05)
        turned = state["fast"] / (state["fast"].norm() + settings.epsilon)
        if weight.ndim == 2 and not name.startswith("embeddings."):
            for _ in range(3):
                turned = 1.5 * turned - 0.5 * turned @ (turned.T @ turned)
        return turned + state["slow"] / (state["power"].sqrt() + 1e-3)

OPTIMIZER = Toy()
'''
TRAIN = "pretraining/train.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_packages(tmp_path_factory.mktemp("copy"), pretraining__optimizers__toy=TOY)


def weights_of(run: Path) -> dict[str, Tensor]:
    """The weights after a run, whose recipe this process cannot read: the optimizer is in the copy alone."""
    checkpoint = list_finished(run)[-1]
    return read_weights(checkpoint, list_parameter_sizes(read_record(checkpoint).shape))


def differences(one: Path, other: Path) -> list[float]:
    """The largest relative difference of each weight after two runs."""
    first, second = weights_of(one), weights_of(other)
    return [float((first[name] - second[name]).norm() / first[name].norm().clamp(min=1e-3)) for name in first]


@pytest.mark.slow
def test_it_trains_alike_on_any_ranks_and_goes_on_on_others(copy: Path, place: Place) -> None:
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
def test_it_is_planned_with_its_own_bytes(copy: Path) -> None:
    words = ("--recipe", "bert_base_adam", "--check", "--ranks", "1", "--gpu", "a100-80", "--optimizer.name")
    shares = {}
    for name in ("adamw", "toy"):
        shares[name] = re.findall(
            r"^ZeRO 1 \(this recipe\) +[\d.]+ +[\d.]+ +([\d.]+)", run_entry(copy, TRAIN, *words, name), re.M
        )
    averages, whole = 4 * 110.1e6, (8 + 12) * 30528 * 768  # another average; the largest matrix with what moves it
    assert shares == {"adamw": ["1.32"], "toy": [f"{(3 * averages + averages + whole) / 1e9:.2f}"]}
