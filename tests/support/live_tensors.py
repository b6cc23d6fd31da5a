"""Notes what a computation makes: tensors that live at the same time, the largest of them, and matrix products."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
