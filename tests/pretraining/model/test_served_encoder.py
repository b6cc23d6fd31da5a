"""A served encoder computes what the one does that it was made of, of every piece or of one of every sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.transformers_models import SHAPE, our_weights

from pretraining.model import serving
from pretraining.model.batch import Batch, pack
from pretraining.model.encoder import Linear
from pretraining.model.rows import Rows
from pretraining.model.serving import PackedProduct, PlainProduct, ServedEncoder, can_pack, product
from pretraining.model.shape import Sees
from pretraining.objectives.declaration import build_model

LENGTHS = np.array([7, 3, 31, 2, 7, 40])


def batch_of() -> Batch:
    count, none = len(LENGTHS), np.empty(0, np.int64)
    pieces, zeros = np.random.default_rng(0).integers(1, SHAPE.vocabulary, LENGTHS.sum()), np.zeros(count, np.int64)
    rows = Rows(np.zeros((count, 2), np.int64), LENGTHS, pieces, LENGTHS // 2 + 1, zeros, zeros, none, none)
    return pack(rows, pieces, none, none)


@pytest.mark.parametrize("sees", get_args(Sees))
@torch.inference_mode()
def test_all_pieces_and_any_one_of_every_sequence_are_equal_to_1e_5(sees: Sees) -> None:
    batch = batch_of()
    models = [build_model(replace(SHAPE, sees=sees)) for _ in range(3)]
    for model in models:
        model.load_state_dict(our_weights())
    expected = models[0].eval().encode(batch)
    torch.testing.assert_close(ServedEncoder(models[1], sees_one=False).all(batch), expected, atol=1e-5, rtol=1e-5)
    places = batch.starts[:-1].long() + torch.tensor([0, 2, 17, 1, 6, 39])
    served = ServedEncoder(models[2], sees_one=True)
    torch.testing.assert_close(served.one(batch, places), expected[places], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_weight_that_is_packed_is_the_one_that_was_given() -> None:
    linear, x = Linear(48, 32), torch.randn(5, 48)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    kinds = [PlainProduct, *([PackedProduct] if can_pack(linear.weight) else [])]
    for made in (*(kind(linear) for kind in kinds), product(linear)):
        torch.testing.assert_close(made(x), x @ linear.weight.t(), atol=1e-5, rtol=1e-5)
        expected = torch.nn.functional.gelu(x @ linear.weight.t() + linear.bias)
        torch.testing.assert_close(made.with_gelu(x), expected, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 200))
def test_runs_hold_every_sequence_once_and_few_pieces(lengths: list[int], most: int) -> None:
    runs = list(serving.parts(lengths, most))
    assert [number for begin, end in runs for number in range(begin, end)] == list(range(len(lengths)))
    for begin, end in runs:
        assert end == begin + 1 or (end - begin) * max(lengths[begin:end]) <= most
