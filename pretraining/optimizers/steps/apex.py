"""NVIDIA apex's kernels, where they are installed: an accelerator on GPUs, never needed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from data_prep.common.errors import UserError
from pretraining.optimizers.lamb import apex_fault

CHUNK = 2048 * 32
"""How many elements a block of the GPU works on, as apex itself has it."""
UNCORRECTED = 1 << 30
"""A step after which bias correction corrects nothing."""


def load_apex(wanted: Literal["auto", "apex", "torch"]) -> Any:
    """Loads apex's module of kernels; None where it is not wanted or, for `auto`, not there."""
    if wanted == "torch":
        return None
    fault = apex_fault()
    if fault is not None and wanted == "apex":
        raise UserError(f'optimizer.kernels = "apex": {fault}, or take "auto"')
    return None if fault else importlib.import_module("amp_C")


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

    `lists` are weights, gradients, first and second averages. The updates have five right digits: apex takes the
    betas' powers and 1 - beta in fp32.
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
