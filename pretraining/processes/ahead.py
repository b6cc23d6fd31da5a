"""Prepares values in a thread, such as the batches of coming steps while one is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NAME = "ahead"


def prepare_in_thread(source: Iterator[T], ahead: int) -> Generator[tuple[T, float], None, None]:
    """Prepares up to `ahead` values of an iterator in a thread; closing the generator ends the thread.

    Yields each value with the seconds of waiting for it; raises an error in place of its value.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)
    try:
        coming = deque(thread.submit(next, source, None) for _ in range(ahead))
        while True:
            begin = time.perf_counter()
            value = coming.popleft().result()
            if value is None:
                return
            coming.append(thread.submit(next, source, None))
            yield value, time.perf_counter() - begin
    finally:
        thread.shutdown(cancel_futures=True)
