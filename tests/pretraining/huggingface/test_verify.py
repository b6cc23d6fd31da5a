"""Exported folders are read back, by us and by transformers: whatever changed on the way is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.transformers_models import PIECES, SHAPE, change_config, change_weights, our_weights

from data_prep.common.errors import UserError
from data_prep.vocabulary.vocabulary import Vocabulary
from pretraining.huggingface import verify
from pretraining.huggingface.folders import write_folder
from pretraining.huggingface.verify import make_probe, verify_export
from pretraining.objectives.declaration import build_model
from pretraining.objectives.mlm import OBJECTIVE as MLM


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    Vocabulary(PIECES, cased=False).write(tmp_path / "data")
    write_folder(tmp_path / "exported", SHAPE, our_weights(), tmp_path / "data", "a card\n")
    return tmp_path / "exported"


NAMES = [
    "bert.embeddings.position_embeddings.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
    "bert.encoder.layer.1.output.LayerNorm.bias",
    "bert.pooler.dense.weight",
    "cls.predictions.bias",
    "cls.seq_relationship.bias",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_a_weight_that_changed_on_its_way_is_noticed(name: str, value: float, exported: Path) -> None:
    change_weights(exported, lambda state: state[name].add_(value * torch.randn(state[name].shape)))
    with pytest.raises(UserError, match=r"not exported: .* logits read back by Cloze differ|no numbers"):
        verify_export(exported, SHAPE, our_weights())


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_transformers_has_its_say(name: str, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that we make in writing and again in reading: only transformers can notice it."""
    change_weights(exported, lambda state: state[f"bert.encoder.layer.0.attention.self.{name}.weight"].mul_(1.01))
    monkeypatch.setattr(verify, "read_folder", lambda _: (SHAPE, our_weights(), ()))
    with pytest.raises(UserError, match="read back by transformers differ"):
        verify_export(exported, SHAPE, our_weights())
    change_weights(exported, lambda state: state.pop("bert.pooler.dense.bias"))
    with pytest.raises(UserError, match=r"transformers reports .*bert\.pooler\.dense\.bias"):
        verify_export(exported, SHAPE, our_weights())


def test_a_config_that_changed_is_noticed(exported: Path) -> None:
    change_config(exported, layer_norm_eps=1e-5)
    with pytest.raises(UserError, match="not exported"):
        verify_export(exported, SHAPE, our_weights())


@pytest.mark.parametrize("positions", [1, 2, 5, 512])
@pytest.mark.parametrize("segments", [1, 2])
def test_the_test_sequences_fit_any_model(positions: int, segments: int) -> None:
    small = replace(SHAPE, positions=positions, segments=segments)
    batch = make_probe(small)
    assert sum(batch.lengths) == len(batch.pieces) == int(batch.starts[-1])
    assert max(batch.lengths) == positions
    assert int(batch.segments.max()) <= segments - 1
    model = build_model(small).initialize(1).eval()
    masked, next_sentence = MLM.logits(model, model.states_for_heads(batch), batch).values()
    assert masked.shape == (len(batch.chosen), small.vocabulary)
    assert next_sentence is not None
    assert next_sentence.shape == (3, 2)
