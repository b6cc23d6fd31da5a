"""States of a few pieces are those that all would have had; rows of zeros behind the pieces change nothing."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import kernels_allowed
from support.pretraining_reference import SMALL, random_batch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pretraining.architectures.bert import ARCHITECTURE as BERT
from pretraining.model.attention import Grouped
from pretraining.model.encoder import Encoder
from pretraining.model.shape import Sees, Shape
from pretraining.objectives.declaration import build_model, count_computed_flops

DROPS = replace(SMALL.encoder, layers=3, hidden=48, heads=3, dropout=0.3, attention_dropout=0.2)
SEEN: list[Sees] = ["both", "before", "after"]


def gradients(encoder: Encoder, states: Tensor) -> dict[str, Tensor]:
    """Of a loss that every number of the states has its own part in."""
    encoder.zero_grad()
    torch.autograd.backward((states.float() * torch.arange(states.numel()).view_as(states).cos()).sum())
    return {name: weight.grad.float() for name, weight in encoder.named_parameters() if weight.grad is not None}


def both_ways(shape: Shape, dtype: torch.dtype, asked: Tensor, recompute: bool = False) -> list[Any]:
    """States and gradients: of what is asked for alone, and picked among all."""
    encoder = Encoder(shape, BERT, recompute).initialize(3).to(dtype)
    encoder.dropout_seed = 5
    batch = random_batch([5, 40, 17, 1, 63], SMALL.vocabulary)
    ways = (encoder.encode(batch, asked), encoder.encode(batch)[asked])
    return [(states.detach(), gradients(encoder, states)) for states in ways]


def assert_equal(found: list[Any], within: float) -> None:
    (states, gradients), (wanted, wanted_gradients) = found
    torch.testing.assert_close(states, wanted, rtol=within, atol=within)
    assert gradients.keys() == wanted_gradients.keys()
    for name, each in wanted_gradients.items():
        difference = float((gradients[name] - each).norm() / each.norm().clamp(min=1e-6))
        assert difference < 10 * within, (name, difference)


@pytest.mark.kernels
@given(
    asked=st.lists(st.integers(0, 125), unique=True, min_size=1, max_size=40),
    sees=st.sampled_from(SEEN),
    recompute=st.booleans(),
)
@settings(max_examples=12)
def test_any_pieces_may_be_asked_for(asked: list[int], sees: Sees, recompute: bool) -> None:
    """With dropout, whose masks belong to the piece and not to its row."""
    assert_equal(both_ways(DROPS.change_learning(sees=sees), torch.float32, torch.tensor(asked), recompute), 1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("sees", SEEN)
def test_in_bf16_too(sees: Sees) -> None:
    """Where rows that belong to no piece round their number up."""
    asked = torch.tensor([0, 3, 60, 125])
    assert_equal(both_ways(DROPS.change_learning(sees=sees), torch.bfloat16, asked), 2e-2)


def test_without_our_kernels_too() -> None:
    """PyTorch draws other masks for other numbers of rows, so that nothing is dropped here."""
    still = replace(DROPS, dropout=0.0, attention_dropout=0.0)
    with kernels_allowed(False):
        assert_equal(both_ways(still, torch.float32, torch.tensor([7, 0, 125])), 1e-5)


def test_what_is_said_to_be_computed_is_what_is_multiplied() -> None:
    """Forward, by PyTorch's own counter, which knows linear layers and heads, and not attention on a CPU."""
    shape, batch = replace(SMALL, dropout=0.0, attention_dropout=0.0), random_batch([64] * 5, SMALL.vocabulary)
    model = build_model(shape).initialize(1)
    with kernels_allowed(False), FlopCounterMode(display=False) as counter:
        model(batch)
    padding = 2 * shape.hidden * (shape.padded_vocabulary - shape.vocabulary) * len(batch.labels)
    attention = 4 * shape.hidden * sum(length**2 for length in batch.lengths) * shape.layers
    wanted = count_computed_flops(shape, batch.lengths, len(batch.labels)) / 3
    assert counter.get_total_flops() - padding + attention == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_may_be_asked_for(dtype: torch.dtype) -> None:
    """As where no piece of a batch is predicted: all gradients are there, and 0."""
    states, found = both_ways(DROPS, dtype, torch.zeros(0, dtype=torch.int64))[0]
    assert states.shape == (0, 48)
    assert len(found) == len([*Encoder(DROPS, BERT).parameters()])
    assert not any(each.any() for each in found.values())


def test_spare_rows_change_neither_states_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found, without = [], Mock(return_value=0)
    for spare_rows in (Grouped.spare_rows, without):
        monkeypatch.setattr(Grouped, "spare_rows", spare_rows)
        encoder = Encoder(SMALL.encoder, BERT).initialize(0).to(torch.bfloat16)
        states = encoder.encode(random_batch((5, 12, 9), SMALL.vocabulary))
        found.append((states.detach(), gradients(encoder, states)))
    if not without.called:
        pytest.skip("no kernels here")
    assert found[0][0].shape == found[1][0].shape == (26, SMALL.hidden)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.02, atol=0.02)
    for name, plain in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], plain, rtol=0.05, atol=0.05 * float(plain.abs().max()))


def spare_rows(rows: int, dtype: torch.dtype, packed: bool = False) -> int:
    layout = Grouped(torch.tensor([0, rows], dtype=torch.int32), (rows,), False, None)
    return layout.spare_rows(torch.empty(rows, 1, dtype=dtype), packed)


@pytest.mark.parametrize("rows", [1, 26, 430, 4000])
def test_few_numbers_of_rows_occur(rows: int) -> None:
    spare = spare_rows(rows, torch.bfloat16)
    assert spare < max(16, rows / 8 + 1)
    assert (rows + spare) % 16 == 0
    assert spare_rows(rows, torch.float32) == 0, "PyTorch's products in fp32 need none"
    assert 0 <= spare_rows(rows, torch.float32, packed=True) <= rows / 8


def test_rows_of_packed_products_are_of_few_numbers() -> None:
    assert len({rows + spare_rows(rows, torch.float32, packed=True) for rows in range(1, 4097)}) <= 16 + 8 * 9
