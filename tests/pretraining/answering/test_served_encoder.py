"""A served encoder computes what the encoder does: in one call of our kernels, or layer by layer."""

import copy
import pickle
from collections import deque
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import threads
from torch import Tensor

from pretraining.answering import layers, one_call
from pretraining.answering.layers import LayerByLayer, ServedProduct, can_pack, make_product, split_runs
from pretraining.answering.one_call import BYTES, HALVES, OneCall, Way, can_multiply, quantise
from pretraining.answering.serving import ServedEncoder
from pretraining.architectures.declaration import serve_encoder
from pretraining.model import cpu_kernels
from pretraining.model.batch import Batch, pack
from pretraining.model.encoder import PretrainingModel
from pretraining.model.modules import Linear
from pretraining.model.rows import Rows
from pretraining.model.shape import Sees, Shape
from pretraining.objectives.declaration import build_model

SHAPE = Shape(2, 96, 3, 224, 50)
pytestmark = pytest.mark.skipif(not cpu_kernels.usable(torch.zeros(1)), reason="no C++ compiler")


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    """Sequences of these lengths, of pieces that depend on the seed and not on the other sequences."""
    sizes, none = np.array(lengths), np.empty(0, np.int64)
    drawn = [np.random.default_rng([seed, number]).integers(1, 50, size) for number, size in enumerate(lengths)]
    zeros, pieces = np.zeros(len(lengths), np.int64), np.concatenate(drawn)
    rows = Rows(np.zeros((len(lengths), 2), np.int64), sizes, pieces, sizes // 2 + 1, zeros, zeros, none, none)
    return pack(rows, pieces, none, none)


def model_of(sees: Sees, shape: Shape = SHAPE) -> PretrainingModel:
    """A model whose weights are far enough from 0 for every part of a layer to be seen."""
    model = build_model(shape.change_learning(sees=sees)).initialize(1).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.mul_(3).add_(noise, alpha=0.05)
    return model


@cache
def encoders(sees: Sees, shape: Shape = SHAPE) -> tuple[PretrainingModel, ServedEncoder]:
    served = serve_encoder(model_of(sees, shape), sees_one=True)
    assert isinstance(served.layers, OneCall if shape == SHAPE else LayerByLayer)
    return model_of(sees, shape), served


NO_PANELS = replace(SHAPE, intermediate=200), replace(SHAPE, hidden=48, heads=1), replace(SHAPE, heads=6)
"""Sizes that are not whole panels, which are answered layer by layer."""


@pytest.mark.parametrize(
    ("shape", "sees"), [*((SHAPE, sees) for sees in get_args(Sees)), *zip(NO_PANELS, get_args(Sees), strict=True)]
)
@given(lengths=st.lists(st.integers(1, 75), min_size=1, max_size=7), draw=st.randoms(use_true_random=False))
@settings(max_examples=10)
@torch.inference_mode()
def test_all_pieces_and_any_one_are_equal_to_1e_5(shape: Shape, sees: Sees, lengths: list[int], draw: Random) -> None:
    batch, (model, served) = batch_of(lengths), encoders(sees, shape)
    expected = model.encode(batch)
    torch.testing.assert_close(served.encode(batch), expected, atol=1e-5, rtol=1e-5)
    places = batch.starts[:-1].long() + torch.tensor([draw.randrange(length) for length in lengths])
    torch.testing.assert_close(served.encode(batch, places), expected[places], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("others", [[], [75], [1] * 40])
@torch.inference_mode()
def test_an_answer_has_the_same_bits_whatever_lies_beside_it(others: list[int]) -> None:
    """Also where others are so many that its rows fall into other blocks."""
    served = encoders("both")[1]
    alone, together = batch_of([37]), batch_of([37, *others])
    first = torch.zeros(1, dtype=torch.long)
    assert torch.equal(served.encode(together)[:37], served.encode(alone))
    assert torch.equal(served.encode(together, together.starts[:-1].long())[:1], served.encode(alone, first))


in_every_way = pytest.mark.parametrize(
    ("dtype", "in_bytes"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
)


@in_every_way
@torch.inference_mode()
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype, in_bytes: bool) -> None:
    served = serve_encoder(model_of("both").to(dtype), sees_one=True, in_bytes=in_bytes)
    batch, found = batch_of([37, 3, 60]), list[Tensor]()
    for count in (1, 2, 7):
        with threads(count):
            found.append(served.encode(batch))
    assert all(torch.equal(each, found[0]) for each in found)


IN_FEW_BITS = [
    pytest.param(way, marks=pytest.mark.skipif(not can_multiply(way), reason="no such products here"))
    for way in (BYTES, HALVES)
]


class ExactBytes(ServedProduct):
    """Products of the same bytes, with sums in fp64."""

    def __init__(self, linear: Linear) -> None:
        self.numbers, self.scales = quantise(linear.weight)
        self.bias = linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(len(x))
        cpu_kernels.call("quantise_rows", x.contiguous(), numbers, scales, *x.shape)
        return ((numbers.double() - 128) @ self.numbers.double().t() * self.scales * scales[:, None]).float()


def run_layers_in_steps(model: PretrainingModel, shape: Shape, make: Any) -> ServedEncoder:
    """Answers layer by layer with these products."""
    served = serve_encoder(copy.deepcopy(model), sees_one=True)
    served.layers = LayerByLayer(shape, deque(model.layers), True, make)  # type: ignore[arg-type]
    return served


@pytest.mark.skipif(not can_multiply(BYTES), reason="no such products here")
@torch.inference_mode()
def test_sums_of_the_largest_bytes_are_exact() -> None:
    """Sums of two such products do not fit into 16 bits, where some processors would cut them off."""
    model, batch = model_of("both"), batch_of([7, 33])
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.weight.copy_(module.weight.sign() * 0.03)
    found = serve_encoder(copy.deepcopy(model), sees_one=True, in_bytes=True).encode(batch)
    right = run_layers_in_steps(model, SHAPE, ExactBytes).encode(batch)
    assert (found - right).square().mean().sqrt() < 0.02 * right.square().mean().sqrt()


@pytest.mark.parametrize("sees", get_args(Sees))
@pytest.mark.parametrize("way", IN_FEW_BITS)
@torch.inference_mode()
def test_in_few_bits_any_piece_is_as_near_to_fp32_as_layer_by_layer(way: Way, sees: Sees) -> None:
    """In bf16 nearer, since single operations also round between the products. Attention takes 32 pieces at a time:
    lengths and places lie at its bounds and between."""
    batch, among = batch_of([7, 1, 31, 32, 33, 64, 65, 150]), torch.tensor([3, 0, 30, 31, 32, 5, 64, 77])
    places, dtype = batch.starts[:-1].long() + among, torch.float32 if way is BYTES else torch.bfloat16
    served = serve_encoder(model_of(sees).to(dtype), True, in_bytes=way is BYTES)
    assert isinstance(served.layers, OneCall)
    make = ExactBytes if way is BYTES else make_product
    in_steps = run_layers_in_steps(model_of(sees).to(dtype), SHAPE.change_learning(sees=sees), make)
    found, right = served.encode(batch), encoders(sees)[1].encode(batch)
    size, factor = right.square().mean(1), 1.2 if way is BYTES else 1
    away, theirs = ((each - right).square().mean(1) for each in (found, in_steps.encode(batch)))
    assert found.dtype == dtype
    assert 0 < away.mean().sqrt() < factor * theirs.mean().sqrt()
    assert away.mean().sqrt() < 0.02 * size.mean().sqrt()
    most, their_most = ((each / size).max().sqrt() for each in (away, theirs))
    assert most < factor * their_most  # the weights decide how far, as torch draws
    assert torch.equal(served.encode(batch, places), found[places])
    assert torch.equal(served.encode(batch_of([7]), places[:1]), found[places[:1]])


@torch.inference_mode()
def test_a_copy_answers_by_itself() -> None:
    """Also in another process, as a server makes its workers."""
    batch, original = batch_of([9, 20]), serve_encoder(model_of("both"), sees_one=True)
    expected = original.encode(batch)
    copies = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    for weight in cast(OneCall, original.layers).weights:
        weight.fill_(torch.nan)
    assert all(torch.equal(each.encode(batch), expected) for each in copies)


@torch.inference_mode()
def test_many_sequences_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what lies between the products stays in the cache; nothing else changes."""
    served, batch = encoders("before")[1], batch_of([30, 1, 75, 12, 50, 50])
    places = batch.starts[1:].long() - 1
    whole = served.encode(batch), served.encode(batch, places)
    for rows in (1, 60, 100):
        monkeypatch.setattr(one_call, "ROWS", rows)
        assert torch.equal(served.encode(batch), whole[0])
        assert torch.equal(served.encode(batch, places), whole[1])


@in_every_way
@torch.inference_mode()
def test_numbers_that_are_none_stay_visible(dtype: torch.dtype, in_bytes: bool) -> None:
    """A text with one makes nothing of the others' answers."""
    model, batch = model_of("both").to(dtype), batch_of([5, 6])
    with torch.no_grad():
        model.embeddings.word.weight[batch.pieces[7]] = torch.nan
    assert batch.pieces[7] not in batch.pieces[:5], "draw other pieces"
    states = serve_encoder(model, sees_one=True, in_bytes=in_bytes).encode(batch, batch.starts[:-1].long())
    assert states[0].isfinite().all()
    assert states[1].isnan().all()


@torch.inference_mode()
def test_the_weight_that_is_packed_is_the_one_that_was_given() -> None:
    linear, x = Linear(48, 32), torch.randn(5, 48)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    kinds = [layers.ServedProduct, *([layers.PackedProduct] if can_pack(linear.weight) else [])]
    for made in (*(kind(linear) for kind in kinds), make_product(linear)):
        torch.testing.assert_close(made(x), x @ linear.weight.t(), atol=1e-5, rtol=1e-5)
        expected = torch.nn.functional.gelu(x @ linear.weight.t() + linear.bias)
        torch.testing.assert_close(made.with_gelu(x), expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 200))
def test_runs_hold_every_sequence_once_and_few_pieces(lengths: list[int], most: int) -> None:
    runs = list(split_runs(lengths, most))
    assert [number for begin, end in runs for number in range(begin, end)] == list(range(len(lengths)))
    for begin, end in runs:
        assert end == begin + 1 or (end - begin) * max(lengths[begin:end]) <= most
