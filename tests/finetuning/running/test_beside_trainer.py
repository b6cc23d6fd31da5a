"""Our fine-tuning has the losses of transformers' Trainer step by step, and learns what it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.beside_trainer import FP32, Trial, our_losses, their_losses

from benchmarks.fine_tuning import make_model
from benchmarks.fine_tuning_scores import compare, open_task, score_ours, score_theirs
from finetuning.settings import load_settings

pytest.importorskip("accelerate")


def largest_difference(one: list[float], other: list[float], steps: int) -> float:
    assert len(one) == len(other) == steps
    return float(np.abs(np.array(one) - np.array(other)).max())


@pytest.mark.slow
def test_the_same_batches_have_the_same_losses_and_others_have_others(tmp_path: Path) -> None:
    data = write_easy_task(tmp_path / "data")
    trial = Trial("sst2", make_model("tiny", data, tmp_path / "tiny"), data, 4, tmp_path)
    ours = our_losses(trial)
    assert largest_difference(ours, their_losses(trial), 4) < 1e-5
    assert largest_difference(ours, their_losses(trial, own_order=True), 4) > 1e-4


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize("task", ["rte", "stsb"])
def test_fifty_steps_have_the_losses_of_the_trainer(task: str, real_data: Path, tmp_path: Path) -> None:
    trial = Trial(task, make_model("tiny", real_data, tmp_path / "tiny"), real_data, 50, tmp_path)
    assert largest_difference(our_losses(trial), their_losses(trial), 50) < 1e-5


def write_easy_task(folder: Path) -> Path:
    """A task of two classes that one word tells apart, and their lengths too."""
    place = folder / "glue" / "SST-2"
    place.mkdir(parents=True)
    rows = [f"the {'water' if number % 2 else 'man'} of {number}\t{number % 2}\n" for number in range(320)]
    for name, some in (("train", rows), ("dev", rows[:64])):
        (place / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *some]))
    return folder


@pytest.mark.slow
def test_both_sides_learn(tmp_path: Path) -> None:
    data = write_easy_task(tmp_path / "data")
    model = make_model("tiny", data, tmp_path / "tiny")
    for seed in ("0", "1"):
        settings = load_settings("glue", [*FP32, "--epochs", "5.0", "--learning_rate", "3e-4", "--seed", seed])
        task = open_task("sst2", data, model, settings)
        assert score_ours(task, model, settings) > 0.9
        assert score_theirs(task, model, settings) > 0.9


def test_means_are_compared_by_their_standard_error() -> None:
    found = compare([0.6, 0.7, 0.8], [0.5, 0.7, 0.6])
    assert found["difference"] == pytest.approx(0.1)
    assert found["standard_error"] == pytest.approx((0.1**2 / 3 + 0.1**2 / 3) ** 0.5)
    assert "standard_error" not in compare([0.5], [0.6])
