"""Prepares values in a thread, such as the batches of coming steps while one is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NAME = "ahead"


def in_thread(source: Iterator[T], ahead: int) -> Generator[tuple[T, float], None, None]:
    """Goes through an iterator in a thread, so many values ahead of whoever takes them; close it to end the thread.

    Each value comes with the seconds for which it was waited, and an error where its value would have come.
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
