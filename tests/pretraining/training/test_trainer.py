"""Parts of the training loop that need no run."""

from __future__ import annotations

import torch

from pretraining.training.trainer import by_layer, repeated


def test_copied_positions_repeat_those_that_are_known() -> None:
    rows = repeated(torch.arange(12.0).view(12, 1), known=4)
    assert rows.flatten().tolist() == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_trust_ratios_by_layer() -> None:
    ratios = {"layers.0.a.weight": 1.0, "layers.0.b.weight[2]": 2.0, "layers.11.a.weight": 3.0, "pooler.weight": 4.0}
    assert by_layer(ratios) == {"layers.0": [1.0, 2.0], "layers.11": [3.0], "pooler": [4.0]}
