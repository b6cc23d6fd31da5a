"""How much memory a process takes while something runs."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType


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

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self._note()

    def _note(self) -> None:
        self.most = max(self.most, read_own_memory() - self._before)
