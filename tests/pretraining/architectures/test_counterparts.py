"""Every architecture against transformers: logits, gradients, and weights there and back."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.operations import kernels_allowed
from support.transformers_models import COUNTERPARTS, Pair, assert_equal, same, train, write_wordpiece

from data_prep.vocabulary.source import read_vocabulary
from pretraining.architectures.declaration import serve_encoder
from pretraining.huggingface.folders import write_folder
from pretraining.huggingface.verify import compute_probe, verify_export
from pretraining.huggingface.weights import list_weights
from pretraining.model import cpu_kernels
from pretraining.model.batch import Batch

by_name = pytest.mark.parametrize("name", COUNTERPARTS)
ONE_OF_EACH = ("bert", "roberta, left to right", "gpt", "modern")
"""Of the others, modules and kernels are the same as of one of these."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that transformers writes of its models."""
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def make_pair(theirs: Path) -> Callable[[str], Pair]:
    """Makes a pair of a test's own; what is made once is copied."""
    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            made[name] = Pair.make(name, theirs / name)
        return copy.deepcopy(made[name])

    return make


@pytest.mark.parametrize("exact", [False, True])
@by_name
def test_logits_and_gradients_are_those_of_transformers(
    name: str, exact: bool, make_pair: Callable[[str], Pair]
) -> None:
    """By our kernels in fp32 and by PyTorch's operations in fp64, where what differs is no rounding; but in ModernBERT
    transformers rounds queries and keys to fp32."""
    with kernels_allowed(not exact):
        assert cpu_kernels.usable(torch.zeros(1)) != exact, "no C++ compiler"
        pair = make_pair(name).to(torch.float64 if exact else torch.float32)
        batch, within = pair.batch(), 1e-5 if not exact else 1e-6 if name == "modern" else 1e-10
        assert_equal(pair.our_logits(batch), pair.their_logits(batch), within)
        found = train(pair.ours, batch)
        assert_equal(found, pair.their_gradients(batch), 1e-6 if exact else 1e-5)  # theirs are imported in fp32
        for weight in list_weights(pair.ours.shape):
            assert not found[weight.ours][weight.size[0] :].any(), "the padding of the vocabulary never learns"


@by_name
def test_an_export_is_read_by_transformers_bit_for_bit(
    name: str, theirs: Path, tmp_path: Path, make_pair: Callable[[str], Pair]
) -> None:
    pair = make_pair(name)
    shape, state = pair.ours.shape, pair.ours.state_dict()
    write_wordpiece(tmp_path / "data", shape.vocabulary)
    write_folder(tmp_path / "ours", shape, state, tmp_path / "data", "a card\n")
    special = read_vocabulary(tmp_path / "data").special
    found = verify_export(tmp_path / "ours", shape, compute_probe(shape, state, special), special)
    assert found["Cloze"] == 0.0
    assert found["transformers"] < 1e-5
    read, report = type(pair.theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert read.dtype == torch.float32
    with safe_open(tmp_path / "ours/model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt", "older versions of transformers refuse another"
    assert same(read.state_dict(), pair.theirs.state_dict())
    assert describe_config(read) == describe_config(type(pair.theirs).from_pretrained(theirs / name))


def describe_config(model: Any) -> dict[str, Any]:
    """What a model's config says, but for where it is from."""
    config: dict[str, Any] = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_layers_computed_again_change_no_bit_and_bf16_stays_near(name: str, make_pair: Callable[[str], Pair]) -> None:
    """What is computed again has the same dropout."""
    pair = make_pair(name)
    batch, exact = pair.batch(), train(pair.ours, pair.batch())
    model = pair.ours.train()
    assert model.shape.dropout > 0 < model.shape.attention_dropout
    model.dropout_seed = 5
    wanted = train(model, batch)
    model.recompute = True
    assert same(train(model, batch), wanted)
    rounded = train(make_pair(name).ours.bfloat16(), batch)
    for weight, right in exact.items():
        distance = (right - rounded[weight].float()).norm() / right.norm().clamp(min=1e-6)
        assert float(distance) < 0.05 or float(right.norm()) < 1e-3, f"{weight}: {float(distance):.3f}"


def cut_out(batch: Batch, number: int) -> Batch:
    """One sequence of a batch by itself."""
    begin, end = batch.starts[number : number + 2].tolist()
    pieces, segments, positions = (ids[begin:end] for ids in (batch.pieces, batch.segments, batch.positions))
    starts = torch.tensor([0, end - begin], dtype=torch.int32)
    return Batch(pieces, segments, positions, starts, (end - begin,), batch.examples[number : number + 1])


@pytest.mark.parametrize("name", ONE_OF_EACH)
@torch.no_grad()
def test_states_do_not_depend_on_what_else_is_asked_for(name: str, make_pair: Callable[[str], Pair]) -> None:
    """Neither on the other sequences of a batch, nor on the other pieces that are; in fp64, for equal sums. Nor on
    whether they are computed by the layers that the architecture has for answers."""
    pair = make_pair(name)
    batch, places = pair.batch(), pair.ours.sequence_places(pair.batch())
    states, served = pair.ours.encode(batch), serve_encoder(pair.ours, sees_one=True)
    torch.testing.assert_close(served.encode(batch), states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(served.encode(batch, places), states[places], atol=1e-5, rtol=1e-5)
    model = make_pair(name).ours.double()
    states = model.encode(batch)
    for chosen in (torch.tensor([200, 0, 74, 75]), places, batch.chosen[:0]):
        torch.testing.assert_close(model.encode(batch, chosen), states[chosen], atol=1e-10, rtol=1e-10)
    apart = [model.encode(cut_out(batch, number)) for number in range(len(batch.lengths))]
    torch.testing.assert_close(torch.cat(apart), states, atol=1e-10, rtol=1e-10)
