"""What makes the host wait for a GPU, found on tensors that have no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
"""Operations whose result's value or size the host must learn."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Refuses operations that ask a device (`meta` here) for values, and copies to it from the host's memory: those
    that are not pinned make the host wait."""
    with _NoHostData(), _NoWaits():
        yield


class _NoHostData(TorchFunctionMode):
    """Refuses tensors of the device that are made of numbers of the host."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        out = function(*arguments, **(named or {}))
        if function in (torch.tensor, torch.as_tensor, torch.from_numpy):
            assert not out.is_meta, f"{function.__name__} copies to the device from the host's memory"
        return out


class _NoWaits(TorchDispatchMode):
    """Refuses operations that ask the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((arguments, named or {})) if isinstance(leaf, Tensor)]
        on_device = any(tensor.is_meta for tensor in tensors)
        assert not (on_device and name in ASKS), f"{name} waits for the device"
        if on_device and name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [index for index in arguments[1] if index is not None and index.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        out = function(*arguments, **(named or {}))
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor):
            assert len({tensor.device for tensor in (out, *tensors)}) == 1, f"{name} from one memory to another"
        return out
