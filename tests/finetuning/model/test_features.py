"""Frozen features: a BiLSTM learns, the encoder stays as it is, and every choice of layers can be trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from support.base_models import write_bert
from support.finetuning import fine_tune, launch, outcome, stop_at
from support.marks import slow
from support.tasks import VOCABULARY
from support.training import assert_ended, assert_well

from data_prep.common.errors import UserError
from finetuning.inputs import Encoded, Sequences
from finetuning.model.features import EncoderWeights, FeatureModel
from finetuning.prediction import load
from finetuning.ragged import Ragged
from finetuning.running.batches import pack
from finetuning.settings import Features, LayerChoice
from pretraining.huggingface.weights import TaskHead
from pretraining.model.encoder import Encoder
from pretraining.model.shape import Shape

SHAPE = Shape(5, 16, 2, 24, 50, 32, pairs=False)
HEAD = TaskHead("tags", ("O", "B-X", "I-X"))
LAYERS = [layers for layers in get_args(LayerChoice) if layers]
SENTENCES = "Paris B-LOC\nis O\nin O\nFrance B-LOC\n\nAnna B-PER\nSmith I-PER\nsleeps O\n\n"


def batch_of(lengths: list[int]) -> Encoded:
    """Sequences whose every piece but the first and the last is a word."""
    rows = [np.arange(5, 5 + length, dtype=np.int32) for length in lengths]
    words = [np.arange(1, length - 1) for length in lengths]
    pieces = Ragged.from_rows(rows)
    tags = Ragged.from_rows([word % len(HEAD.labels) for word in words])
    return Encoded(Sequences(pieces, pieces.lengths), tags, Ragged.from_rows(words))


@pytest.mark.parametrize("layers", LAYERS)
def test_every_choice_of_layers_learns_and_leaves_the_encoder(layers: LayerChoice) -> None:
    torch.manual_seed(1)
    weights = Encoder(SHAPE).initialize(1).state_dict()
    before = {name: weight.clone() for name, weight in weights.items()}
    model = FeatureModel([EncoderWeights(SHAPE, weights)], HEAD, Features(layers=layers, hidden=8))
    batch = pack(batch_of([6, 9, 4]), np.arange(3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert not [name for name, _ in model.named_parameters() if name.startswith(("embeddings", "layers"))]
    assert all(torch.equal(model.frozen.encoders[0].state_dict()[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("layers", LAYERS)
def test_features_are_the_states_that_they_are_called(layers: LayerChoice) -> None:
    weights = Encoder(SHAPE).initialize(1).state_dict()
    model = FeatureModel([EncoderWeights(SHAPE, weights)], HEAD, Features(layers=layers, hidden=8))
    batch = pack(batch_of([6, 9, 4]), np.arange(3))
    encoder = Encoder(SHAPE)
    encoder.load_state_dict(weights)
    with torch.no_grad():
        states = list(encoder.eval().encode_layers(batch))
        assert len(states) == SHAPE.layers + 1
        torch.testing.assert_close(states[-1], encoder.encode(batch))
        wanted = {
            "embeddings": states[0],
            "last": states[5],
            "second-to-last": states[4],
            "sum-all": states[1] + states[2] + states[3] + states[4] + states[5],
            "weighted-last-four": (states[2] + states[3] + states[4] + states[5]) / 4,
            "weighted-all": (states[1] + states[2] + states[3] + states[4] + states[5]) / 5,
            "concat-last-four": torch.cat([states[2], states[3], states[4], states[5]], dim=1),
            "mix": (states[0] + states[1] + states[2] + states[3] + states[4] + states[5]) / 6,
        }
        torch.testing.assert_close(model.compute_features(batch), wanted[layers][batch.words])


def test_a_sentence_is_tagged_the_same_in_any_company() -> None:
    torch.manual_seed(1)
    model = FeatureModel([EncoderWeights(SHAPE, {}).fill_missing(1)], HEAD, Features(layers="last", hidden=8))
    together = batch_of([6, 2, 9, 4])  # the second has no word
    with torch.no_grad():
        all_at_once = model.logits(pack(together, np.arange(4)))
        one_by_one = torch.cat([model.logits(pack(together, np.array([number]))) for number in range(4)])
    torch.testing.assert_close(all_at_once, one_by_one)


@pytest.mark.parametrize("more", [slow([]), slow(["--from-scratch"])], ids=["pre-trained", "from scratch"])
def test_a_run_that_is_stopped_is_the_straight_one(tmp_path: Path, more: list[str]) -> None:
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(SENTENCES * 6)
    model = write_bert(tmp_path / "model", VOCABULARY)

    def command(out: str) -> list[str]:
        places = ["--data", tmp_path, "--model", model, "--out", tmp_path / out, "--features", "weighted-all"]
        settings = [
            "--length",
            "48",
            "--epochs",
            "20",
            "--batch-size",
            "4",
            "--features.hidden",
            "16",
            "--patience",
            "0",
        ]
        alone = ["--precision.dtype", "fp32", "--tags.document_context", "false"]  # as predict.py sees sentences
        return [str(word) for word in [*places, *settings, *alone, "--learning-rates", "0.02", *more]]

    assert_well(fine_tune(command("straight"), entry="run_ner"))
    assert_ended(launch(command("stopped"), fault=partial(stop_at, 4), entry="run_ner"), 75, "after step 4, and saved")
    assert_well(fine_tune(command("stopped"), entry="run_ner"))
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "straight")
    folder = tmp_path / "straight" / "ner"
    lines = (folder / "predictions" / "predictions_dev.txt").read_text().splitlines()
    said = [line.split()[-1] for line in lines if line.strip()]
    answers = load(folder, "fp32")([line.split() for line in ("Paris is in France", "Anna Smith sleeps")] * 6)
    assert len({*said}) > 1, "a tag alone would say little"
    assert [tag for answer in answers for tag in answer["tags"]] == said  # what it said of the same words then
    assert not (folder / "model" / "config.json").exists()
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="stands on a model that is not there; put it back"):
        load(folder)
    write_bert(model, VOCABULARY, hidden=48)
    with pytest.raises(UserError, match="is not the model that it learned on"):
        load(folder)
