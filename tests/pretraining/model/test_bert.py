"""The model against transformers' own, its sizes, and its batches."""

from dataclasses import fields, replace

import pytest
import torch
from support.pretraining_reference import random_batch

from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.architectures.declaration import make_shape
from pretraining.config.settings import Model
from pretraining.model.shape import DROPOUT, Shape
from pretraining.objectives.declaration import build_model, count_step_flops, num_parameters


def test_the_published_sizes_have_the_published_parameters() -> None:
    millions = {name: num_parameters(make_shape(name, 30522)) / 1e6 for name in BERT.sizes}
    assert 109 < millions["base"] < 111
    assert 335 < millions["large"] < 340


def test_flops_are_those_that_the_peers_count() -> None:
    """Per sequence, forward and backward, the masked head on predictions alone; figures in GFLOP."""
    for name, length, predictions, gigaflops in (
        ("large", 128, 20, 240.6),
        ("large", 512, 80, 1020.5),
        ("base", 128, 20, 69.9),
        ("base", 512, 80, 301.4),
    ):
        assert count_step_flops(make_shape(name, 30522), [length], predictions) / 1e9 == pytest.approx(
            gigaflops, abs=0.06
        )


def test_fresh_weights_are_a_cut_normal_distribution() -> None:
    model = build_model(make_shape("tiny", 1000)).initialize(7)
    weight = model.get_parameter("layers.0.attention.qkv.weight")
    assert weight.abs().max().item() <= 0.04
    assert weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.03)  # the cut at two deviations narrows it
    assert not any(parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    assert not model.embeddings.word.weight[1000:].any()
    again = build_model(make_shape("tiny", 1000)).initialize(7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_batches_are_on_the_device_that_is_asked_for() -> None:
    batch = random_batch([9, 4, 30], 101)
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert all(getattr(moved, field.name).is_meta for field in fields(batch) if field.type == "Tensor")
    assert moved.lengths == batch.lengths


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_arrive_whole_on_a_gpu() -> None:
    for seed in range(20):  # the pinned memory of one is used again for the next
        batch = random_batch([64] * 48, 101, seed)
        moved = batch.to("cuda")
        assert moved.pieces.is_cuda
        for field in fields(batch):
            if field.type == "Tensor":
                assert torch.equal(getattr(moved, field.name).cpu(), getattr(batch, field.name))


TINY = make_shape("tiny", vocabulary=100)


def test_differences_are_told() -> None:
    other = replace(TINY, hidden=256, vocabulary=99)
    assert TINY.differences(other) == [("hidden", 128, 256), ("vocabulary", 100, 99)]
    assert other.differences(TINY) == [("hidden", 256, 128), ("vocabulary", 99, 100)]


def test_weights_do_not_depend_on_dropout() -> None:
    assert not TINY.differences(replace(TINY, dropout=0.0, attention_dropout=0.0, initializer_range=0.5))


def test_every_number_has_its_name_in_the_recipe_or_one_in_words() -> None:
    names = {field.name for field in fields(Shape)} - {*DROPOUT, "vocabulary", "learns", "initializer_range"}
    assert names <= set(Model.model_fields)
