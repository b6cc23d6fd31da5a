"""Scores of models of every objective on shards, and what of them counts for bits a character."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.base_models import write_bert
from support.training import Place

from data_prep.shards import Manifest
from data_prep.vocabulary.vocabulary import SPECIAL
from pretraining import evaluate
from pretraining.checkpoint.models import StoredModel
from pretraining.data.batches import validation_batches
from pretraining.data.dataset import Dataset
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import objectives

EXAMPLES, LENGTH = 24, 32


@torch.no_grad()
def nats_of(model: StoredModel, data: Path) -> list[tuple[str, float]]:
    """The pieces that a model is asked for, with what each costs, from its logits in plain PyTorch."""
    bert, manifest = model.build_pretrained(), Manifest.read(data)
    dataset = Dataset(data, manifest, LENGTH, validation=True, objective=objectives()[bert.shape.objective])
    found = []
    for batch, _ in validation_batches(dataset, 0, 1, 1, EXAMPLES):
        states = bert.encode(batch)[batch.chosen]
        logits = bert.head("masked_head").logits(states, bert.embeddings.word.weight)
        nats = -logits.double().log_softmax(1).gather(1, batch.labels[:, None])[:, 0]
        found += list(zip((model.vocabulary.pieces[label] for label in batch.labels), nats.tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", objectives())
def test_a_model_of_every_objective_is_scored_on_shards(
    name: str, shared: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_bert(tmp_path / "model", shared.data, objective=name)
    words = [str(folder), "--data", str(shared.data), "--length", str(LENGTH), "--examples", str(EXAMPLES)]
    assert evaluate.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    asked = nats_of(StoredModel.open(str(folder)), shared.data)
    loss = found["figures"]["masked_loss" if "masked_loss" in found["figures"] else "piece_loss"]
    assert found["predictions"] == len(asked)
    assert loss == pytest.approx(sum(nats for _, nats in asked) / len(asked), rel=1e-5)
    plain = [(piece.removeprefix("##"), nats) for piece, nats in asked if piece not in SPECIAL]
    characters = sum(len(piece) for piece, _ in plain)
    assert found["characters"] == characters
    bits = sum(nats for _, nats in plain) / math.log(2) / characters
    assert found["bits_per_character"] == pytest.approx(bits, rel=1e-5)
    assert sum(found["left_out"].values()) == len(asked) - len(plain)
    assert ("[SEP]" in found["left_out"]) == (objectives()[name].sees != "both")
    assert evaluate.main(words) == 0
    assert ("left out of the bits" in capsys.readouterr().out) == (len(plain) < len(asked))


@pytest.mark.parametrize("name", objectives())
@pytest.mark.parametrize("pairs", [False, True])
def test_what_the_pieces_cost_is_one_of_the_sums(name: str, pairs: bool) -> None:
    objective, shape = objectives()[name], replace(Shape(1, 2, 1, 2, 9), objective=name, pairs=pairs)
    assert objective.sum_of_pieces in objective.sums(shape)


@pytest.mark.parametrize("words", [["--fill", "a [MASK]"], ["--data", "shards"]])
def test_a_gpu_that_is_not_there_is_told(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evaluate.main([str(tmp_path), *words, "--device", "cuda"]) == 2
    assert "a GPU was asked for" in capsys.readouterr().err
