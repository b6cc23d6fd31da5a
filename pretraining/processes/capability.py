"""Whether the installed PyTorch has code for a GPU."""

from __future__ import annotations

import re

import torch

from data_prep.common.errors import UserError

OLDER = "the build for CUDA 12.6 (cu126), from PyTorch's own index"
"""The last with code for GPUs below compute capability 7.5, such as V100 (7.0)."""


def require_code(device: torch.device) -> torch.device:
    """Returns the GPU; an error where the installed PyTorch has no code for it, which its first kernel would find."""
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    known = [found for found in map(_read, built_for) if found is not None]
    if not known or any(_runs(*code, capability) for code in known):
        return device
    older = capability < min(code[1] for code in known)
    cure = f"install {OLDER if older else 'a newer PyTorch'}"
    raise UserError(
        f"{torch.cuda.get_device_name(device)} has compute capability {_shown(capability)}, and this PyTorch "
        f"{torch.__version__} has code for {', '.join(built_for)} alone\n{cure}, or take the device `cpu`"
    )


def _read(name: str) -> tuple[str, tuple[int, int]] | None:
    """Kind and compute capability of code that is called as in `sm_90a` or `compute_120`; None for other vendors'."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
    return None if found is None else (found[1], (int(found[2]), int(found[3])))


def _runs(kind: str, code: tuple[int, int], capability: tuple[int, int]) -> bool:
    """Machine code runs on later GPUs of the same generation, what is compiled when it is loaded on all later ones."""
    return code <= capability and (kind == "compute" or code[0] == capability[0])


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
