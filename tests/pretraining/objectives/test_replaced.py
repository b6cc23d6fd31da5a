"""`rtd` against ELECTRA in transformers: a generator and a discriminator on the same embeddings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import kernels_allowed
from support.pretraining_reference import SMALL, make_uneven, pad_batch, random_rows
from support.transformers_models import electra_config
from torch import Tensor
from transformers import ElectraForMaskedLM, ElectraForPreTraining

from data_prep.common.arrays import Array
from pretraining.architectures.declaration import find_architecture, read_shape
from pretraining.data.batches import full_sequences
from pretraining.model.batch import PretrainingBatches
from pretraining.model.electra import GeneratorHead, SamplingBatch
from pretraining.model.encoder import PretrainingModel
from pretraining.model.rows import Draw, Rows
from pretraining.model.shape import Shape
from pretraining.objectives import declaration
from pretraining.objectives.declaration import build_model, configure_objective, find_objective, objectives
from pretraining.objectives.rtd import ReplacedPieces, ReplacedSettings

LENGTHS = (5, 70, 96, 17, 64, 3, 33)
HALF = ReplacedSettings(name="rtd", generator_share=0.5, generator_layers=1, detection_weight=20.0)
PER_EXAMPLE = ("where", "lengths", "boundaries", "random_next", "predictions")


def make_shape(given: ReplacedSettings = HALF, **changes: Any) -> Shape:
    """A small ELECTRA that learns by these settings."""
    shape = replace(SMALL, architecture="electra", **changes)
    return replace(shape, learns=configure_objective(given).learning(has_pairs=True))


def make_model(**changes: Any) -> tuple[ReplacedPieces, PretrainingModel]:
    """The objective of such a model, and the model, whose weights all matter."""
    shape = make_shape(**changes)
    objective = find_objective(shape)
    assert isinstance(objective, ReplacedPieces)
    return objective, make_uneven(build_model(shape))


def make_batch(objective: ReplacedPieces, seed: int = 0) -> SamplingBatch:
    batch = objective.batch(random_rows(LENGTHS, SMALL.vocabulary, seed))
    assert isinstance(batch, SamplingBatch)
    return batch


def list_names(model: PretrainingModel, generator: Any, discriminator: Any) -> dict[str, list[Tensor]]:
    """The parameters of transformers for each of ours."""
    shape, kind = model.shape, find_architecture("electra")
    own = find_objective(shape).find_generator(shape)  # type: ignore[attr-defined]
    names = {weight.ours: weight.theirs for weight in kind.weights(shape)}
    names |= {weight.ours: weight.theirs for weight in kind.heads(shape)["detection_head"]}
    found = {ours: [discriminator.get_parameter(name) for name in theirs] for ours, theirs in names.items()}
    layers = {f"generator.{each.ours}": each.theirs for each in kind.weights(own) if each.ours.startswith("layers.")}
    for ours, theirs in (
        ("embeddings.projection", "electra.embeddings_project"),
        ("predictor.transform", "generator_predictions.dense"),
        ("predictor.norm", "generator_predictions.LayerNorm"),
    ):
        layers |= {f"generator.{ours}.{end}": (f"{theirs}.{end}",) for end in ("weight", "bias")}
    layers["generator.predictor.bias"] = ("generator_lm_head.bias",)
    return found | {ours: [generator.get_parameter(name) for name in theirs] for ours, theirs in layers.items()}


def make_theirs(model: PretrainingModel) -> tuple[Any, Any, dict[str, list[Tensor]]]:
    """ELECTRA's two models in transformers with our weights, in fp64; and their parameters for each of ours."""
    own = find_objective(model.shape).find_generator(model.shape)  # type: ignore[attr-defined]
    discriminator: Any = ElectraForPreTraining(electra_config(model.shape))
    generator: Any = ElectraForMaskedLM(electra_config(own))
    for each in (discriminator, generator):
        each.double().eval()
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    names = list_names(model, generator, discriminator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = parameter[: sum(len(each) for each in names[name])]
            for each, part in zip(names[name], rows.chunk(len(names[name])), strict=True):
                each.copy_(part)
    return generator, discriminator, names


def reference(generator: Any, discriminator: Any, batch: SamplingBatch, weight: float) -> tuple[Tensor, Tensor]:
    """The loss of ELECTRA on padded sequences, and the pieces that are drawn."""
    given = {name: pad_batch(batch)[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    real = given["attention_mask"].bool()
    logits = generator(**given).logits[real][batch.chosen]
    sums = logits.detach().softmax(1).numpy().cumsum(1)
    drawn = torch.tensor([int((row <= chance).sum()) for row, chance in zip(sums, batch.chances.numpy(), strict=True)])
    read, replaced = given["input_ids"].clone(), torch.zeros(len(batch.pieces), dtype=torch.float64)
    pieces = batch.pieces.clone()
    pieces[batch.chosen] = drawn
    read[real] = pieces
    replaced[batch.chosen[drawn != batch.labels]] = 1
    found = discriminator(**{**given, "input_ids": read}).logits[real]
    masked = F.cross_entropy(logits, batch.labels)
    return masked + weight * F.binary_cross_entropy_with_logits(found, replaced), pieces


def test_loss_and_gradients_are_those_of_electra() -> None:
    """In fp64, with the pieces that both draw; the tables learn from both models."""
    with kernels_allowed(False):
        objective, model = make_model(dropout=0.0, attention_dropout=0.0)
        model = model.double()
        generator, discriminator, names = make_theirs(model)
        batch, read = make_batch(objective), []
        model.embeddings.register_forward_pre_hook(lambda _, given: read.append(given[0].pieces))
        sums = model(batch)
        found = objective.loss(sums, PretrainingBatches((batch,), len(LENGTHS), len(batch.labels), sum(LENGTHS)))
        wanted, pieces = reference(generator, discriminator, batch, HALF.detection_weight)
        assert torch.equal(read[0], batch.pieces)
        assert torch.equal(read[1], pieces)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
        torch.autograd.backward([found, wanted])
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        theirs = torch.cat([each.grad for each in names[name] if each.grad is not None])
        assert float((parameter.grad[: len(theirs)] - theirs).abs().max()) < 1e-8, name
        assert not parameter.grad[len(theirs) :].any(), name
    counts = {"predictions": len(batch.labels), **{name: float(each.detach()) for name, each in sums._asdict().items()}}
    assert objective.total(objective.measure(counts)) == pytest.approx(float(found.detach()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compute_the_same(dtype: torch.dtype) -> None:
    """And layers that are computed again: with dropout, bit for bit."""
    objective, model = make_model()
    batch, found = make_batch(objective), []
    model = model.train().to(dtype)
    model.dropout_seed = 7
    for model.recompute in (False, True):
        sums = model(batch)
        model.zero_grad()
        loss = objective.loss(sums, PretrainingBatches((batch,), len(LENGTHS), len(batch.labels), sum(LENGTHS)))
        torch.autograd.backward(loss)
        found.append([loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)])
    assert len(found[0]) == len([*model.parameters()]) + 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    model.eval()
    tried = model(full_sequences(3, 20, 4, objective))
    assert int(tried.read) == 60
    assert int(tried.detected) <= int(tried.replaced) <= 12
    with torch.no_grad():
        ours, exact = model(batch), model.double()(batch)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for name in ("masked", "detection"):
        assert float(getattr(ours, name)) == pytest.approx(float(getattr(exact, name)), rel=tolerance)


def test_pieces_are_drawn_by_their_probabilities() -> None:
    """Of evenly spaced numbers each piece gets its share, in several parts too; the padding of the vocabulary none."""
    head = GeneratorHead(SMALL, 12, None)
    generator, count = torch.Generator().manual_seed(0), 20_000
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    decoder = torch.randn(SMALL.padded_vocabulary, SMALL.hidden, generator=generator) * 0.3
    state = torch.randn(1, 12, generator=generator)
    chances = (torch.arange(count) + 0.5) / count
    counts = head.sample(state.expand(count, -1), decoder, chances).bincount(minlength=SMALL.vocabulary)
    wanted = head.logits(state, decoder).detach().softmax(1)[0]
    assert len(counts) == SMALL.vocabulary
    assert float((counts / count - wanted).abs().max()) < 2 / count
    assert int(head.sample(state, decoder, torch.tensor([1 - 2.0**-24]))) < SMALL.vocabulary


def draw_chances(rows: Rows, keys: Array | None = None) -> Tensor:
    """The numbers by which pieces of a batch are drawn."""
    batch = objectives()["rtd"].batch(rows, None if keys is None else Draw(keys, 0.0, SMALL.vocabulary, 4, 3))
    assert isinstance(batch, SamplingBatch)
    return batch.chances


@settings(max_examples=15)
@given(st.lists(st.integers(4, 60), min_size=1, max_size=6), st.integers(0, 2**63), st.integers(0, 5))
def test_a_draw_follows_from_the_example_and_its_key(lengths: list[int], seed: int, at: int) -> None:
    """Not from the other examples of a batch: the numbers of one alone are those in a batch."""
    rows = random_rows(lengths, SMALL.vocabulary)
    keys = np.random.default_rng(seed).integers(0, 2**64, len(lengths), dtype=np.uint64)
    at %= len(lengths)
    ends = np.cumsum(rows.predictions)
    own = slice(ends[at] - rows.predictions[at], ends[at])
    flat = {"pieces": rows.pieces[rows.starts[at] :][: lengths[at]]}
    flat |= {"positions": rows.positions[own], "labels": rows.labels[own]}
    one = Rows(**{name: getattr(rows, name)[at : at + 1] for name in PER_EXAMPLE}, **flat)
    alone, other = (draw_chances(one, key) for key in (keys[at : at + 1], keys[at : at + 1] + np.uint64(1)))
    chances = draw_chances(rows, keys)
    assert torch.equal(chances[own], alone)
    assert not torch.equal(other, alone)
    assert float(chances.min()) >= 0
    assert float(chances.max()) < 1
    assert torch.equal(draw_chances(rows), draw_chances(rows)), "a validation is the same every time"


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_a_generator_has_whole_heads_and_a_shape_that_is_stored(share: float) -> None:
    given = ReplacedSettings(name="rtd", generator_share=share)
    shape = make_shape(given)
    objective = find_objective(shape)
    assert isinstance(objective, ReplacedPieces)
    own = objective.find_generator(shape)
    heads = max(1, round(4 * share))
    assert (own.layers, own.hidden, own.heads, own.intermediate) == (2, 12 * heads, heads, 24 * heads)
    assert read_shape(shape.values()) == shape
    assert find_objective(read_shape(shape.values())) is objective
    other = make_shape(ReplacedSettings(name="rtd", generator_share=share, detection_weight=1.0))
    assert shape.differences(other) == [("objective.detection_weight", 50.0, 1.0)]
    assert declaration.num_parameters(shape) == sum(each.numel() for each in build_model(shape).parameters()) - 27 * (
        48 + 1
    )


def test_operations_are_those_of_both_passes() -> None:
    shape = make_shape()
    h, v, n, m = 48, 101, 30, 4
    model = 2 * (2 * (4 * h * h + 2 * h * 96) * n + 4 * h * n * n) + n * 2 * (h * h + h)
    own = 2 * (4 * 24 * 24 + 2 * 24 * 48) * n + 4 * 24 * n * n + n * 2 * h * 24 + m * 2 * (24 * h + h * v)
    assert declaration.count_step_flops(shape, [n], m) == 3 * (model + own)
