"""A GPU for tests where there is none: tensors that say they are on it, lie on the host, and are computed with.

    with PretendedGpu() as gpu:
        weights = torch.randn(8).to("cuda")
        weights.add_(torch.ones(8))     # RuntimeError: on two devices, as on a machine that has a GPU
        float(weights.sum())            # gpu.waits is 1

Ranks find NCCL between them: over their gloo group, but a tensor that lies on the host is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from pretraining.model import gpu_operations

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_BOTH = (Tensor.to, Tensor.copy_, Tensor.__getitem__)
"""what takes tensors of both devices"""
WAITS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__)
"""what brings numbers to the host, which waits for them"""
DEVICE = Tensor.device.__get__
IS_THERE = {Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # type: ignore[attr-defined]
GRADIENT = (Tensor.grad.__get__, Tensor.grad.__set__)  # type: ignore[union-attr]

NEW_GROUP = dist.new_group


class GpuTensor(Tensor):
    """A tensor that says it is on the GPU; `numbers` are what it holds."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, numbers: Tensor) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(cls, numbers.size(), dtype=numbers.dtype)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{operation}: a pretended GPU knows what Python calls within PretendedGpu")


class PretendedGpu(TorchFunctionMode):
    """Surrounds what is to find a GPU, and NCCL between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        """how often the host has waited for numbers"""
        self._gloo: list[Any] = []
        """groups that were made for the host"""
        doubles: dict[str, Callable[..., Any]] = {"get_backend": self._backend, "new_group": self._new_group}
        doubles |= {name: self._collective(getattr(dist, name)) for name in ("all_reduce", "broadcast")}
        self._patches: list[Any] = [mock.patch.object(dist, name, double) for name, double in doubles.items()]
        self._patches.append(mock.patch.object(gpu_operations, "usable", return_value=False))  # Triton finds no GPU

    def __enter__(self) -> PretendedGpu:
        for patch in self._patches:
            patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patch in self._patches:
            patch.stop()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = {id(each.numbers): each for each in given if isinstance(each, GpuTensor)}
        if function in GRADIENT or function is torch.device:
            return function(*args, **kwargs)
        if here and (function == DEVICE or function in IS_THERE):
            return IS_THERE.get(function, GPU)
        if here and function not in ON_BOTH and any(not isinstance(each, GpuTensor) and each.dim() for each in given):
            raise RuntimeError(f"{function.__name__}: expected all tensors on one device, found cpu and cuda:0")
        device = _wanted_device(function, args, kwargs) or (GPU if here else HOST)
        self.waits += bool(here) and (function in WAITS or (device == HOST and not kwargs.get("non_blocking")))
        found = function(*tree_map(on_host, args), **tree_map(on_host, kwargs))
        if function in WAITS or not (here or device == GPU):
            return found
        if device == HOST or (function is Tensor.to and not here):
            found = found.clone()  # across, also where the real host had nothing to move
        if device == HOST:
            return found
        return tree_map(lambda each: here[id(each)] if id(each) in here else _on_gpu(each), found)

    def _backend(self, group: Any = None) -> str:
        return "gloo" if any(group is each for each in self._gloo) else "nccl"

    def _new_group(self, *args: Any, backend: str = "nccl", **more: Any) -> Any:
        group = NEW_GROUP(*args, **more)
        if backend == "gloo":
            self._gloo.append(group)
        return group

    def _collective(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation of all ranks that takes what lies where their group works."""

        def checked(tensor: Tensor, *args: Any, group: Any = None, **more: Any) -> Any:
            if isinstance(tensor, GpuTensor) != (self._backend(group) == "nccl"):
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            return operation(on_host(tensor), *args, group=group, **more)

        return checked


def _wanted_device(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call asks for its result."""
    if function is Tensor.cpu:
        return HOST
    words = [kwargs.get("device"), *(args[1:] if function is Tensor.to else ())]
    named = [torch.device(word).type for word in words if isinstance(word, str | torch.device)]
    return None if not named else GPU if named[0] == "cuda" else HOST


def on_host(value: Any) -> Any:
    """What is computed with: of tensors, devices and all else that calls are made with."""
    if isinstance(value, GpuTensor):
        return value.numbers
    return HOST if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")) else value


def _on_gpu(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) else value
