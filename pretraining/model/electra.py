"""The modules of ELECTRA that BERT does not have: heads of its own, and a generator of pieces that replace others.

n pieces, m predicted ones, H hidden, G hidden of the generator.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GeluPooler(nn.Linear):
    """Transforms the states of the pieces that stand for their sequences."""

    def __init__(self, hidden: int):
        super().__init__(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class DetectionHead(nn.Module):
    """Computes the logit of each piece that it was replaced, (n,)."""

    def __init__(self, hidden: int):
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(F.gelu(self.dense(hidden)))
        return logits.squeeze(1)
