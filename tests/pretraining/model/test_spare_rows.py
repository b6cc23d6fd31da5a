"""Rows of zeros behind the pieces, which keep products in bf16 to few sizes, change nothing."""

from __future__ import annotations

import pytest
import torch
from support.pretraining_reference import SMALL, random_batch
from torch import Tensor

from pretraining.model.attention import Grouped
from pretraining.model.encoder import Encoder

LENGTHS = (5, 12, 9)


def step() -> tuple[Tensor, dict[str, Tensor]]:
    """The hidden states of a batch, with dropout, and the gradients of their sum of squares."""
    batch = random_batch(LENGTHS, SMALL.vocabulary)
    model = Encoder(SMALL.encoder).initialize(0).to(torch.bfloat16).train()
    hidden = model.encode(batch)
    torch.autograd.backward(hidden.float().square().sum())
    return hidden.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_spare_rows_change_neither_states_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, gradients = step()
    asked = []

    def none(layout: Grouped, states: Tensor, packed: bool = False) -> int:
        asked.append(len(states))
        return 0

    monkeypatch.setattr(Grouped, "spare_rows", none)
    plain, expected = step()
    if not asked:
        pytest.skip("no kernels here")
    assert hidden.shape == plain.shape == (sum(LENGTHS), SMALL.hidden)
    torch.testing.assert_close(hidden, plain, rtol=0.02, atol=0.02)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0.05, atol=0.05 * float(expected[name].abs().max()))


@pytest.mark.parametrize("rows", [1, 26, 430, 4000])
def test_few_numbers_of_rows_occur(rows: int) -> None:
    layout = Grouped(torch.tensor([0, rows], dtype=torch.int32), (rows,))
    states = torch.empty(rows, 1, dtype=torch.bfloat16)
    spare = layout.spare_rows(states)
    assert spare < max(16, rows / 8 + 1)
    assert (rows + spare) % 16 == 0
    assert layout.spare_rows(states.float()) == 0, "PyTorch's products in fp32 need none"
    assert 0 <= layout.spare_rows(states.float(), packed=True) <= rows / 8


def test_rows_of_packed_products_are_of_few_numbers() -> None:
    def rounded(rows: int) -> int:
        layout = Grouped(torch.tensor([0, rows], dtype=torch.int32), (rows,))
        return rows + layout.spare_rows(torch.empty(rows, 1), packed=True)

    assert len({rounded(rows) for rows in range(1, 4097)}) <= 16 + 8 * 9
