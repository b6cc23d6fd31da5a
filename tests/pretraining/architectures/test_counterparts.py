"""Every architecture against transformers: logits, gradients, and weights there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.counterparts import COUNTERPARTS, Pair, assert_equal, train
from support.operations import kernels_allowed
from support.transformers_models import same

from data_prep.vocabulary.source import read_vocabulary
from pretraining.architectures.declaration import serve_encoder
from pretraining.huggingface.folders import write_folder
from pretraining.huggingface.verify import compute_probe, verify_export
from pretraining.huggingface.weights import list_weights
from pretraining.model import cpu_kernels
from pretraining.model.batch import Batch

WAYS = {"kernels": torch.float32, "torch": torch.float32, "torch in fp64": torch.float64}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_logits_and_gradients_are_those_of_transformers(name: str, way: str, tmp_path: Path) -> None:
    """By our kernels and by PyTorch's operations; in fp64 what differs is no rounding."""
    with kernels_allowed(way == "kernels"):
        assert cpu_kernels.usable(torch.zeros(1)) == (way == "kernels"), "no C++ compiler"
        pair = Pair.make(name, tmp_path).to(WAYS[way])
        batch, exact = pair.batch(), WAYS[way] == torch.float64
        assert_equal(pair.our_logits(batch), pair.their_logits(batch), COUNTERPARTS[name].exact if exact else 1e-5)
        found = train(pair.ours, batch)
        assert_equal(found, pair.their_gradients(batch), 1e-6 if exact else 1e-5)  # theirs are imported in fp32
        for weight in list_weights(pair.ours.shape):
            assert not found[weight.ours][weight.size[0] :].any(), "the padding of the vocabulary never learns"


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_an_export_is_read_by_transformers_bit_for_bit(name: str, tmp_path: Path) -> None:
    pair, row = Pair.make(name, tmp_path / "theirs"), COUNTERPARTS[name]
    shape, state = pair.ours.shape, pair.ours.state_dict()
    row.write_vocabulary(tmp_path / "data", shape.vocabulary)
    write_folder(tmp_path / "ours", shape, state, tmp_path / "data", "a card\n")
    special = read_vocabulary(tmp_path / "data").special
    wanted = compute_probe(shape, state, special)
    found = verify_export(tmp_path / "ours", shape, wanted, special)
    assert found["Cloze"] == 0.0
    assert found["transformers"] < 1e-5
    read, report = row.kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert read.dtype == torch.float32
    with safe_open(tmp_path / "ours/model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt", "older versions of transformers refuse another"
    assert same(read.state_dict(), pair.theirs.state_dict())
    assert describe_config(read) == describe_config(type(pair.theirs).from_pretrained(tmp_path / "theirs"))


def describe_config(model: Any) -> dict[str, Any]:
    """What a model's config says, but for where it is from."""
    config: dict[str, Any] = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layers_that_are_computed_again_change_no_bit(name: str, tmp_path: Path) -> None:
    """With dropout."""
    pair = Pair.make(name, tmp_path)
    model, batch = pair.ours.train(), pair.batch()
    assert model.shape.dropout > 0 < model.shape.attention_dropout
    model.dropout_seed = 5
    wanted = train(model, batch)
    model.recompute = True
    assert same(train(model, batch), wanted)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_gradients_in_bf16_stay_near_those_in_fp32(name: str, tmp_path: Path) -> None:
    pair = Pair.make(name, tmp_path)
    exact = train(pair.ours, pair.batch())
    rounded = train(pair.ours.bfloat16(), pair.batch())
    for name, wanted in exact.items():
        distance = (wanted - rounded[name].float()).norm() / wanted.norm().clamp(min=1e-6)
        assert float(distance) < 0.05 or float(wanted.norm()) < 1e-3, f"{name}: {float(distance):.3f}"


def cut_out(batch: Batch, number: int) -> Batch:
    """One sequence of a batch by itself."""
    begin, end = batch.starts[number : number + 2].tolist()
    pieces, segments, positions = (ids[begin:end] for ids in (batch.pieces, batch.segments, batch.positions))
    starts = torch.tensor([0, end - begin], dtype=torch.int32)
    return Batch(pieces, segments, positions, starts, (end - begin,), batch.examples[number : number + 1])


@pytest.mark.parametrize("name", COUNTERPARTS)
@torch.no_grad()
def test_states_do_not_depend_on_what_else_is_asked_for(name: str, tmp_path: Path) -> None:
    """Neither on the other sequences of a batch, nor on the other pieces that are; in fp64, for equal sums."""
    pair = Pair.make(name, tmp_path).to(torch.float64)
    batch, model = pair.batch(), pair.ours
    states = model.encode(batch)
    for chosen in (torch.tensor([200, 0, 74, 75]), model.sequence_places(batch), batch.chosen[:0]):
        torch.testing.assert_close(model.encode(batch, chosen), states[chosen], atol=1e-10, rtol=1e-10)
    apart = [model.encode(cut_out(batch, number)) for number in range(len(batch.lengths))]
    torch.testing.assert_close(torch.cat(apart), states, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", COUNTERPARTS)
@torch.inference_mode()
def test_answers_are_the_states_of_the_model(name: str, tmp_path: Path) -> None:
    """By the layers that the architecture has for answers, or by those of training."""
    pair = Pair.make(name, tmp_path)
    batch, places = pair.batch(), pair.ours.sequence_places(pair.batch())
    states, served = pair.ours.encode(batch), serve_encoder(pair.ours, sees_one=True)
    torch.testing.assert_close(served.compute_all(batch), states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(served.compute_one(batch, places), states[places], atol=1e-5, rtol=1e-5)
