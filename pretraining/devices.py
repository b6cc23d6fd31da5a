"""Types that the CPU multiplies; names of GPUs, what they can do, and whether this PyTorch can use them.

PyTorch makes GPUs of AMD look like NVIDIA's, and calls them `cuda` too. Where they differ is told here alone. No GPU of
AMD's has run any of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch

from data_prep.common.errors import UserError

AMPERE = (8, 0)
"""The compute capability from which NVIDIA's GPUs have flash attention."""
NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""What Linux has where a driver of NVIDIA's, or of AMD's, has found a GPU."""


def find_kind() -> Literal["cpu", "cuda"]:
    """Returns the kind of device on which this process computes by default."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_amd() -> bool:
    """Whether this PyTorch is built for GPUs of AMD."""
    return torch.version.hip is not None


def read_name(device: torch.device) -> str:
    """Reads the name that its maker gave a GPU."""
    return torch.cuda.get_device_name(device)


def has_bf16() -> bool:
    """Whether the GPU of this process multiplies numbers in bf16."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies numbers in bf16, and oneDNN may do so (`ONEDNN_MAX_CPU_ISA=AVX2` forbids it)."""
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_int8() -> bool:
    """Whether the CPU multiplies integers of 8 bits with exact sums (AVX512-VNNI), and oneDNN uses that. Only a trial
    tells: without it, oneDNN's sums of two products saturate at 16 bits."""
    if not torch.cpu._is_vnni_supported() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    numbers, most = torch.full((1, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127, dtype=torch.int8)
    weight, zeros = torch.ops.onednn.qlinear_prepack(most, None), torch.zeros(64, dtype=torch.int64)
    theirs = (weight, torch.ones(64), zeros)
    found = torch.ops.onednn.qlinear_pointwise(numbers, 1.0, 0, *theirs, None, 1.0, 0, torch.float32, "none", [], "")
    return bool((found == 64 * 255 * 127).all())


def has_flash(device: torch.device) -> bool:
    """Whether the flash kernels of this PyTorch run on a GPU; those for AMD's were not tried."""
    built: bool = torch.backends.cuda.is_flash_attention_available()
    return built and not is_amd() and torch.cuda.get_device_capability(device) >= AMPERE


def require_code(device: torch.device) -> torch.device:
    """Returns the GPU; UserError where this PyTorch has no code for it, which its first kernel would find. Machine code
    runs on later GPUs of the same generation, what is compiled when it is loaded on all later ones."""
    has, built = torch.cuda.get_device_capability(device), " ".join(torch.cuda.get_arch_list())
    codes = [(kind, (int(major), int(minor))) for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", built)]
    if codes and not any(code <= has and (kind == "compute" or code[0] == has[0]) for kind, code in codes):
        cure = "install a PyTorch that has (older GPUs: its builds for CUDA 12.6), or take the device `cpu`"
        raise UserError(f"this PyTorch has code for {built}, and none for {read_name(device)}\n{cure}")
    return device


def explain_absence() -> tuple[str, str]:
    """Explains why PyTorch finds no GPU, and what to do."""
    if torch.version.cuda is None and not is_amd():
        return "this torch is built for CPUs alone", "install a torch that is built for your GPU"
    watcher = "rocm-smi" if is_amd() else "nvidia-smi"
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:  # such as that the driver is too old for it
        said = str(error).strip().splitlines()
        return (said or ["torch finds no working GPU"])[0], f"check {watcher}, and that its driver fits this torch"
    return "torch finds no working GPU", f"check {watcher}"


def explain_unused() -> str:
    """Returns a warning where this machine has a GPU that PyTorch cannot use; nothing otherwise."""
    if torch.cuda.is_available() or not any(node.exists() for node in NODES):
        return ""
    why, cure = explain_absence()
    return f"there is a GPU here, and it is not used: {why}; {cure}"
