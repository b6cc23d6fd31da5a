"""What a computation does: the memory that it takes, the tensors and products that it makes, what would make the host
wait for a GPU, and what PyTorch refuses there where only deterministic operations are allowed.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def read_own_memory() -> int:
    """Reads the bytes of memory that this process has written, without files that are mapped into it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


class MemoryWatch:
    """Looks every millisecond how much more memory the process takes than when the watch began."""

    def __init__(self) -> None:
        self.most = 0
        """bytes"""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would serve what is watched, unseen
        self._before = read_own_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self._note()

    def _note(self) -> None:
        self.most = max(self.most, read_own_memory() - self._before)


class Launches(TorchDispatchMode):
    """Counts PyTorch's operations that launch something on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (operation.is_view or "empty" in str(operation) or "split" in str(operation))
        return operation(*args, **(kwargs or {}))


class LiveTensors(TorchDispatchMode):
    """Counts what operations make while it is entered, in bytes, until nobody holds it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = self.products = 0
        self.largest = 0
        """the numbers of the largest tensor"""
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        self.products += "mm" in str(function)
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, Tensor) and (key := each.untyped_storage()._cdata) not in self._known:
                self._known.add(key)
                size = each.untyped_storage().nbytes()
                self.largest = max(self.largest, size // each.itemsize)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(each.untyped_storage(), self._gone, key, size)
        return found

    def _gone(self, key: int, size: int) -> None:
        self._now -= size
        self._known.discard(key)


REFUSED = set(
    "bincount cumsum histc kthvalue median nanmedian put put_ scatter_reduce scatter_reduce_ _ctc_loss_backward "
    "_embedding_bag _embedding_bag_dense_backward grid_sampler_2d_backward nll_loss2d_forward nll_loss2d_backward "
    "upsample_linear1d_backward upsample_bilinear2d_backward _adaptive_avg_pool2d_backward "
    "adaptive_max_pool2d_backward reflection_pad1d_backward".split()
)
"""What the documentation of torch.use_deterministic_algorithms names, as far as a language model may come near it. What
kernels refuse that stand behind other operations (products, attention) is for tests on a GPU to find."""


class OnlyDeterministic(TorchDispatchMode):
    """Raises an error at what is in REFUSED, and notes all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert name not in REFUSED, f"{name} is not deterministic on a GPU"
        self.seen.add(name)
        return function(*arguments, **(named or {}))


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
