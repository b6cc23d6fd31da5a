"""The number types and the exactness in which a model computes."""

from __future__ import annotations

import os
import platform
from typing import Literal

import torch
from torch.utils import deterministic

from data_prep.common.errors import UserError
from pretraining import devices
from pretraining.config.settings import Compute, Dtype, Precision
from pretraining.model import gpu_layouts

DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_dtype(wanted: Dtype | Literal["auto"], device: torch.device) -> torch.dtype:
    """Chooses the type in which the model computes, by the support of the device."""
    if wanted == "auto":
        if device.type == "cuda":
            wanted = "bf16" if devices.has_bf16() else "fp16"
        else:
            wanted = "bf16" if devices.cpu_has_bf16() else "fp32"
    if wanted == "fp16" and device.type == "cpu":
        raise UserError('precision.dtype = "fp16": not on a CPU; take "bf16", "fp32" or "auto"')
    if wanted == "bf16" and device.type == "cuda" and not devices.has_bf16():
        raise UserError(f'precision.dtype = "bf16": {devices.read_name(device)} has none; take "fp16" or "auto"')
    return DTYPES[wanted]


def explain_slowness(wanted: Dtype | Literal["auto"], device: torch.device) -> str | None:
    """Describes the cost of a dtype on an x86 CPU that cannot multiply bf16; None for other devices and fp32."""
    if device.type != "cpu" or devices.cpu_has_bf16() or platform.machine() not in ("x86_64", "AMD64"):
        return None
    return {
        "auto": "fp32: this processor has no fast bf16 (AVX512-BF16 or AMX), with which steps take a third of the time",
        "bf16": 'this processor emulates bf16, 7 to 17 times slower than fp32; take precision.dtype = "auto"',
    }.get(wanted)


def name_dtype(dtype: torch.dtype) -> Dtype:
    """Returns the name of a type in recipes."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def set_arithmetic(precision: Precision, compute: Compute, device: torch.device) -> None:
    """Sets how this process computes, before its GPU computes anything; refuses what the GPU does not support."""
    gpu_layouts.choose(compute.attention)
    choose_dtype(precision.dtype, device)
    if device.type != "cuda":
        return  # where results are the same bits anyway
    torch.set_float32_matmul_precision("highest")  # products in fp32 are of all 24 bits, not of TF32's 11
    torch.use_deterministic_algorithms(compute.deterministic)
    if compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with these buffers it adds up in one order
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # we read what we have written
