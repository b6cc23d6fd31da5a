"""What stands for NVIDIA apex's `amp_C` where there is no GPU: the same arguments, demands and arithmetic, in fp32.

As in csrc/: amp_C_frontend.cpp, multi_tensor_apply.cuh, multi_tensor_lamb_stage_1.cu, multi_tensor_l2norm_kernel.cu.
The real ones crash the process where they are handed a pointer of the wrong device; these say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from support.pretended_gpu import on_host
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """Moves the averages, and leaves Adam's updates in the last list. `step` counts from 0."""
    assert isinstance(step, int)
    assert -(2**31) <= step < 2**31
    demand(global_grad_norm, torch.float32, "cpu")  # dereferenced before the kernel is launched
    norm, limit = np.float32(global_grad_norm), np.float32(max_global_grad_norm)
    clip = norm / limit if norm > limit else np.float32(1)
    _demand_lists(noop_flag, tensor_lists, depth=5)
    demand(per_tensor_decay, torch.float32, "cuda")
    betas = [np.float32(beta1), np.float32(beta2)]
    corrections = [float(np.float32(1) - beta ** np.float32(step + 1)) for beta in betas]
    keep, keep_square = map(float, betas)
    new, new_square = (float(np.float32(1) - beta) for beta in betas)
    decays = on_host(per_tensor_decay).tolist()
    for decay, *parts in zip(decays, *tensor_lists, strict=True):
        gradient, weight, first, second, update = map(on_host, parts)
        scaled = gradient / float(clip)
        first.copy_(first * keep + new * scaled)
        second.copy_(second * keep_square + new_square * scaled * scaled)
        denominator = (second / corrections[1]).sqrt() + float(np.float32(epsilon))
        update.copy_(first / corrections[0] / denominator + decay * weight)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors, (1,), and where it is asked for of each by itself, in fp32."""
    _demand_lists(noop_flag, tensor_lists, depth=1)
    norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in tensor_lists[0]])
    return torch.linalg.vector_norm(norms).view(1), norms if per_tensor else norms[:0]


def demand(tensor: Tensor, dtype: torch.dtype, device: str) -> None:
    """Refuses what the real ones would read as if it were another type, or from the other device's memory."""
    assert isinstance(tensor, Tensor)
    if tensor.dtype != dtype:
        raise RuntimeError(f"expected scalar type {dtype} but found {tensor.dtype}")
    if tensor.device.type != device:
        raise RuntimeError(f"Segmentation fault: a pointer of {tensor.device} is read on {device}")


def _demand_lists(noop_flag: Tensor, tensor_lists: Lists, depth: int) -> None:
    demand(noop_flag, torch.int32, "cuda")
    assert len(tensor_lists) == depth, "tensor_lists.size() != depth"
    assert len(tensor_lists[0]) > 0, "tensor_lists[0].size() is not > 0"
    for tensors in tensor_lists:
        assert len(tensors) == len(tensor_lists[0]), "Size mismatch among tensor lists"
        for tensor, other in zip(tensors, tensor_lists[0], strict=True):
            demand(tensor, torch.float32, "cuda")  # our flat tensors are; the real ones take 16 bits too
            assert tensor.is_contiguous(), "A tensor was not contiguous."
            assert tensor.numel() == other.numel(), "Size mismatch"
