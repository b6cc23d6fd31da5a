"""How much memory a process takes, and tensors of PyTorch, while something runs."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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
