"""Keeps a rank on the cores next to its GPU, so that data between them takes no detour."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

DEVICES = Path("/sys/bus/pci/devices")


def own_cores() -> list[int]:
    """Lists the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def keep_near(device: torch.device, threads: int) -> None:
    """Keeps this process on those of its cores that are next to its GPU, if they are enough for its threads. Where a
    launcher has given it others, or the system does not say which are near, all stays as it is."""
    gpu: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError, OSError, ValueError):
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = read_cores((DEVICES / address / "local_cpulist").read_text())
        if len(own := near.intersection(own_cores())) >= threads:
            os.sched_setaffinity(0, own)


def read_cores(text: str) -> set[int]:
    """The numbers in a list of cores as Linux writes it, such as 0-3,8."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
