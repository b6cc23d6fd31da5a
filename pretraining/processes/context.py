"""The surroundings of a rank's work, from when the ranks have met to their end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console

from data_prep.common.launchers import World
from data_prep.common.terminal import open_console
from pretraining.processes.stopping import Control
from pretraining.processes.watchdog import Watch


@dataclass(frozen=True)
class Context:
    """The surroundings of a rank's work: the other ranks, its device, the console, and who may stop it."""

    world: World
    device: torch.device
    console: Console
    control: Control
    watch: Watch
    run: str = ""
    """which run this is, where others print on the same console beside it"""

    def warn(self, message: str) -> None:
        """Prints a warning where errors go."""
        open_console(stderr=True, soft_wrap=True).print(f"warning: {message}", markup=False)
