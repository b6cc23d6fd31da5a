"""A served encoder computes what the one does that it was made of, of every piece or of one of every sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from support.transformers_models import SHAPE, our_weights

from pretraining.model.batch import Batch, pack
from pretraining.model.rows import Rows
from pretraining.model.serving import PackedProduct, ServedEncoder, can_pack
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
    torch.testing.assert_close(ServedEncoder(models[1]).all(batch), expected, atol=1e-5, rtol=1e-5)
    places = batch.starts[:-1].long() + torch.tensor([0, 2, 17, 1, 6, 39])
    served = ServedEncoder(models[2])
    torch.testing.assert_close(served.one(batch, places), expected[places], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_the_weight_that_is_packed_is_the_one_that_was_given() -> None:
    weight, x = torch.randn(32, 48), torch.randn(5, 48)
    if not can_pack(weight):
        pytest.skip("weights are not packed here")
    torch.testing.assert_close(PackedProduct(weight)(x), x @ weight.t(), atol=1e-5, rtol=1e-5)
