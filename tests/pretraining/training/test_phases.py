"""A phase of training: what it does without a run."""

from __future__ import annotations

import torch

from pretraining.training.phases import repeat_rows


def test_copied_positions_repeat_those_that_are_trained() -> None:
    rows = repeat_rows(torch.arange(12.0).view(12, 1), trained=4)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
