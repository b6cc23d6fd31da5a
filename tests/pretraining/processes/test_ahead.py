"""Values that a thread prepares ahead of whoever takes them."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.commands import wait_for

from pretraining.processes.ahead import NAME, prepare_in_thread


class Slow(Iterator[int]):
    """Numbers that take their time, until one fails."""

    def __init__(self, seconds: float = 0.0, fails_at: int = 1 << 60) -> None:
        self.seconds, self.fails_at, self.prepared = seconds, fails_at, 0

    def __next__(self) -> int:
        time.sleep(self.seconds)
        if self.prepared == self.fails_at:
            raise ValueError("no such row")
        self.prepared += 1
        return self.prepared


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_values_come_in_their_order_and_end() -> None:
    assert [value for value, _ in prepare_in_thread(iter([5, 4, 3]), 2)] == [5, 4, 3]
    assert not threads()


def test_only_so_many_are_prepared_ahead() -> None:
    source = Slow()
    with closing(prepare_in_thread(source, 3)) as values:
        assert next(values)[0] == 1
        assert len(threads()) == 1, "or no test would notice one that is left"
        wait_for(lambda: source.prepared == 4)
        time.sleep(0.05)
        assert source.prepared == 4
        assert next(values)[1] < 0.5
        wait_for(lambda: source.prepared == 5)


def test_waiting_is_measured_and_closing_ends_the_thread_at_once() -> None:
    values = prepare_in_thread(Slow(seconds=0.1), 100)
    assert 0.1 < sum(next(values)[1] for _ in range(3)) < 20
    begin = time.monotonic()
    values.close()
    values.close()  # does no harm
    assert time.monotonic() - begin < 5, "97 more take 10 seconds"
    assert not threads()


def test_an_error_comes_where_its_value_would_have_come() -> None:
    values = prepare_in_thread(Slow(fails_at=2), 4)
    assert [next(values)[0] for _ in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="no such row"):
        next(values)
    assert not threads()


def test_an_error_of_whoever_takes_them_ends_the_thread() -> None:
    with pytest.raises(ZeroDivisionError), closing(prepare_in_thread(Slow(), 2)) as values:
        assert next(values)[0] / 0
    assert not threads()
