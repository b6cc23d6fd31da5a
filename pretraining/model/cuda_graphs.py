"""CUDA graphs: the host starts all kernels of a piece of work at once, where one after another takes 5 to 20 µs each.

A graph repeats its kernels at the same addresses and with the same numbers from Python. What changes from one time to
the next must be in tensors, which are written before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result], pool: Any = None) -> tuple[Callable[[], Result], Any]:
    """Captures the kernels of a piece of work without running them. Returns a function that runs them and gives the
    tensors of the capture, and the pool of their memory, which other graphs can share."""
    graph: Any = torch.cuda.CUDAGraph()
    here: Any = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails leaves another one current
    with here, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = work()

    def replay() -> Result:
        graph.replay()
        return result

    return replay, graph.pool()


def describe_failure(error: RuntimeError) -> str:
    """Says in one line why a capture has failed."""
    return f"CUDA graphs do not work here ({str(error.__context__ or error).splitlines()[0]})"


class RepeatedWork:
    """Does a piece of work many times, by a CUDA graph where its key is that of the time before.

    The first time with a key it runs kernel by kernel, which compiles and loads what a capture cannot. If a capture
    fails, a warning says so, and all later work runs kernel by kernel.
    """

    def __init__(self, cost: str) -> None:
        """`cost`: what is slower without graphs, for the warning."""
        self.cost, self.failed = cost, False
        self.key: Hashable = None
        self.replay: Callable[[], None] | None = None
        """does the work by a graph; None before the capture"""

    def run(self, work: Callable[[], None], key: Hashable) -> None:
        """Does the work. The key holds all addresses and numbers that it has from Python."""
        if self.failed or key != self.key:
            self.key, self.replay = key, None
            work()
            return
        if self.replay is None:
            try:
                self.replay, _ = capture(work)
            except RuntimeError as error:
                self.failed = True
                warnings.warn(f"{describe_failure(error)}: {self.cost}", stacklevel=2)
                work()
                return
        self.replay()
