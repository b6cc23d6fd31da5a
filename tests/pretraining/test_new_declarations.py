"""An objective or an optimizer that a stranger adds is one file: trained with, saved, planned, exported and told of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.copies import copy_packages, run_entry
from support.pretraining_reference import random_rows
from support.training import Place, records
from torch import Tensor
from transformers import AutoModelForCausalLM

from pretraining.architectures.declaration import make_shape
from pretraining.checkpoint.reading import list_parameter_sizes, read_weights
from pretraining.checkpoint.record import list_finished, read_record
from pretraining.model.batch import pack
from pretraining.objectives import declaration, ltr

OBJECTIVE = '''
"""Every next piece from those before it, and from the last one how long the text is."""
from __future__ import annotations
from typing import NamedTuple
from pretraining.objectives import ltr
from pretraining.objectives.declaration import Figure

class Sums(NamedTuple):
    following: object
    right: object
    length: object

class LeftToRight(ltr.LeftToRight):
    learns = "says the next piece"
    logits_at_once = None
    figures = (
        Figure("piece_loss", "piece loss", "nats", "cross-entropy of the next piece", "next-piece loss"),
        Figure("piece_accuracy", "piece accuracy", "%", "next pieces that are the first choice"),
        Figure("length_error", "length error", "pieces", "how far the length is off"),
    )

    def heads(self, shape):
        return {"masked_head": "head of next pieces", "length_head": "head of lengths"}

    def build(self, shape):
        from torch import nn
        return {**super().build(shape), "length_head": nn.Linear(shape.hidden, 1)}

    def parameters(self, shape):
        return super().parameters(shape) + shape.hidden + 1

    def flops(self, shape, sequences, predictions):
        return super().flops(shape, sequences, predictions) + 2 * shape.hidden * sequences

    def needed_pieces(self, model, batch):
        import torch
        return torch.cat([batch.chosen, model.sequence_places(batch)])

    def num_needed(self, shape, sequences, predictions):
        return sequences + predictions

    def losses(self, model, seen, batch):
        of_pieces, of_sequences = seen.tensor_split([len(batch.chosen)])
        pieces, right = model.head("masked_head")(of_pieces, model.embeddings.word.weight, batch.labels)
        guess = model.head("length_head")(of_sequences).squeeze(1).float()
        length = (guess - batch.starts.diff().float() / 64).abs().sum()
        return Sums(pieces, right, length)

    def sums(self, shape):
        return Sums._fields

    def loss(self, losses, batches):
        return losses.following / batches.predictions + losses.length / batches.sequences

    def measure(self, totals):
        predictions, sequences = totals["predictions"], totals["sequences"]
        shares = {"piece_loss": totals["following"] / predictions, "piece_accuracy": totals["right"] / predictions}
        return {**shares, "length_error": 64 * totals["length"] / sequences}

    def total(self, figures):
        return figures["piece_loss"] + figures["length_error"] / 64

    def describe_figures(self, figures, width=0):
        return [f"next piece {figures['piece_loss']:.4f}", f"length {figures['length_error']:.1f}"]

    def exported_heads(self, shape):
        return ["masked_head"]

    def logits(self, model, seen, batch):
        return super().logits(model, seen[: len(batch.chosen)], batch)

    def describe_heads(self, shape):
        return "head of next pieces"

OBJECTIVE = LeftToRight()
'''
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


def test_the_example_of_an_objective_is_all_that_has_to_be_written() -> None:
    """It learns what `ltr` learns."""
    assert declaration.__doc__ is not None
    found = re.search(r"\n\n(    class Sums.*?)\n\n`make", declaration.__doc__, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {**vars(declaration), "NamedTuple": NamedTuple, "Tensor": Tensor, "np": np, "pack": pack}
    exec(dedent(found[1]), names)
    example, rows, shape = names["OBJECTIVE"], random_rows([5, 9], 50), make_shape("tiny", 50)
    model = (
        declaration.build_model(shape.change_learning(objective="ltr", pairs=False, sees="before")).initialize(0).eval()
    )
    kinds = (example, ltr.OBJECTIVE)
    batches = [kind.batch(rows) for kind in kinds]
    ours, theirs = (
        kind.losses(model, model.states_for_heads(batch), batch) for kind, batch in zip(kinds, batches, strict=True)
    )
    assert torch.equal(ours.nats, theirs.nats)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    added = {"pretraining__objectives__left_to_right": OBJECTIVE, "pretraining__optimizers__toy": OPTIMIZER}
    return copy_packages(tmp_path_factory.mktemp("copy"), **added)


@pytest.mark.slow
def test_an_objective_is_trained_exported_and_told_of(copy: Path, place: Place) -> None:
    said = run_entry(copy, TRAIN, *place.command("run", *WORDS, "--phases.0.learning_rate", "1e-2"), ranks=2)
    run = place.folder / "run"
    steps, scores = records(run), records(run, "evaluation")
    for line in (*steps, *scores):
        assert {"piece_loss", "piece_accuracy", "length_error"} <= line.keys()
        assert not [name for name in line if "mask" in name or "next" in name]
    assert steps[-1]["piece_loss"] < steps[0]["piece_loss"] - 0.1
    assert steps[0]["loss"] == pytest.approx(steps[0]["piece_loss"] + steps[0]["length_error"] / 64)
    assert f"next piece {scores[-1]['piece_loss']:.4f}  length {scores[-1]['length_error']:.1f}" in said
    assert "logits read back by Cloze and transformers agree" in said
    assert "left out: length_head, of which transformers knows nothing" in said
    card = (run / "export" / "README.md").read_text()
    assert "A BERT encoder with its head of next pieces" in card
    assert "| next pieces that are the first choice |" in card
    again = run_entry(copy, "pretraining/export.py", run, "--out", place.folder / "exported")
    assert "agree exactly" in again or "agree to" in again
    anew = run_entry(copy, "pretraining/export.py", place.folder / "exported", "--out", place.folder / "anew")
    assert "logits read back by Cloze and transformers agree" in anew
    model: Any = AutoModelForCausalLM.from_pretrained(place.folder / "anew").eval()
    pieces = torch.randint(5, model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(1))
    other = pieces.clone()
    other[0, -1] = 5
    with torch.inference_mode():
        first, second = model(pieces).logits, model(other).logits
    assert torch.equal(first[0, :-1], second[0, :-1])
    assert not torch.equal(first[0, -1], second[0, -1])


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
        shares[name] = re.findall(
            r"^ZeRO 1 \(this recipe\) +[\d.]+ +[\d.]+ +([\d.]+)", run_entry(copy, TRAIN, *words, name), re.M
        )
    averages, whole = 4 * 110.1e6, (8 + 12) * 30528 * 768  # another average; the largest matrix with what moves it
    assert shares == {"adamw": ["1.32"], "toy": [f"{(3 * averages + averages + whole) / 1e9:.2f}"]}
