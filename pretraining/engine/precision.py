"""In which numbers a model computes."""

from __future__ import annotations

from typing import Literal

import torch

from data_prep.common.errors import UserError
from pretraining.config.settings import Dtype

DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_dtype(wanted: Dtype | Literal["auto"], device: torch.device) -> torch.dtype:
    """Chooses the numbers that the model computes in, by what the device has."""
    if wanted == "auto":
        if device.type == "cuda":
            wanted = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        else:
            wanted = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    if wanted == "fp16" and device.type == "cpu":
        raise UserError('precision.dtype = "fp16": not on a CPU; take "bf16", "fp32" or "auto"')
    return DTYPES[wanted]


def name_dtype(dtype: torch.dtype) -> Dtype:
    """What recipes call a type of numbers."""
    return next(name for name, known in DTYPES.items() if known == dtype)
