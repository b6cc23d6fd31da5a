"""The time of a phase, the same on all ranks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


class Clock:
    """The seconds of a phase, the same on all ranks: rank 0's, agreed on in steps that log."""

    def __init__(self, seconds: float, device: torch.device):
        self.seconds = seconds
        self.agreed = False
        """whether all ranks have agreed on it yet"""
        self._device = device
        self._start = time.monotonic() - seconds
        self._last, self._steps, self._pace = seconds, 0, 0.0

    def step(self) -> None:
        """Counts a step. Between agreements, a step is taken to last as long as those before."""
        self._steps += 1
        self.seconds = self._last + self._steps * self._pace

    def agree(self) -> None:
        """Takes rank 0's clock; all ranks call it together."""
        now = torch.tensor([time.monotonic() - self._start], dtype=torch.float64, device=self._device)
        dist.broadcast(now, src=0)
        if self._steps:
            self._pace = (float(now) - self._last) / self._steps
        self.seconds = self._last = float(now)
        self._steps, self.agreed = 0, True
