"""NVIDIA apex's kernels, where they are installed: an accelerator on GPUs, never needed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.common.errors import UserError

CHUNK = 2048 * 32
"""How many elements a block of the GPU works on, as apex itself has it."""
UNCORRECTED = 1 << 30
"""A step after which bias correction corrects nothing."""


def find_apex(wanted: Literal["auto", "apex", "torch"], device: torch.device) -> Any:
    """Finds apex's module of kernels; None where it is not to be used, an error where it is asked for and not there."""
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        raise UserError('optimizer.kernels = "apex": needs a GPU; take "auto"')
    try:
        return importlib.import_module("amp_C")
    except ImportError:
        if wanted == "auto":
            return None
        raise UserError(f'optimizer.kernels = "apex": {_what_is_missing()}, or take "auto"') from None


def _what_is_missing() -> str:
    cure = "build NVIDIA's from its source with --cpp_ext --cuda_ext (github.com/NVIDIA/apex)"
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return f"apex is not installed; {cure}"
    return (
        f"the package named apex that is installed here ({version}) has no amp_C: it is another project of that name, "
        f"or NVIDIA's built without its kernels; pip uninstall apex, and {cure}"
    )


def lamb_updates(
    amp_c: Any,
    lists: Sequence[Sequence[Tensor]],
    *,
    decay: float,
    steps: float,
    betas: tuple[float, float],
    epsilon: float,
    corrected: bool,
) -> tuple[list[Tensor], Tensor]:
    """Moves the averages; returns the updates, and the squares of weights and updates.

    `lists` are weights, gradients, first and second averages.
    """
    weights, gradients, first, second = (list(tensors) for tensors in lists)
    device = weights[0].device
    updates = [torch.empty_like(weight) for weight in weights]
    overflowed = torch.zeros(1, dtype=torch.int32, device=device)
    decays = torch.full((len(weights),), decay, device=device)
    step = int(steps) - 1 if corrected else UNCORRECTED  # the kernel counts from 0
    tensors = [gradients, weights, first, second, updates]
    # A norm of 0 against a limit of 1 clips nothing, since gradients come clipped. The kernel's caller reads it itself.
    norm = torch.zeros(1)
    amp_c.multi_tensor_lamb_stage1_cuda(CHUNK, overflowed, tensors, decays, step, *betas, epsilon, norm, 1.0)
    norms = [amp_c.multi_tensor_l2norm(CHUNK, overflowed, [tensors], True)[1] for tensors in (weights, updates)]
    return updates, torch.stack(norms, dim=1).double().square()
