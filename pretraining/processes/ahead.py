"""Work in threads: values that are prepared ahead, such as batches of coming steps, and calls that may never end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
NAME = "ahead"


def await_call(seconds: float, work: Callable[[], T]) -> T:
    """Calls a function in a thread, and returns its result; LateError after `seconds`. The thread may never end."""
    done: Future[T] = Future()

    def do_work() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=do_work, daemon=True).start()
    return done.result(seconds)


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
