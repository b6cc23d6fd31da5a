"""Shows a person how far the work is and how long it will take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0  # where the output is no terminal


def join_first(texts: Sequence[str], between: str = ", ", most: int = 20) -> str:
    """Joins the first texts, and says how many more there are."""
    return between.join([*texts[:most], *[f"{len(texts) - most} more"] * (len(texts) > most)])


class StepProgress:
    """The line that tells how far a step is: live in a terminal, and now and then anew where the output is none."""

    def __init__(self, console: Console, step: str, unit: str, total: int, done: int) -> None:
        """Begins a step of `total` units, of which `done` were done earlier; without a unit it shows no amounts."""
        self._console, self._step, self._unit = console, step, unit
        self._total, self._done, self._before = total, done, done
        self._start = time.monotonic()

    def advance(self, amount: int) -> None:
        """Adds what was done since the last call, in the unit of the step."""
        self._done += amount

    def line(self, finished: bool = False) -> Text:
        """Says which share is done, how fast it goes and how long the rest takes, or how long it all took."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        rate = (self._done - self._before) / seconds
        share = 100 if finished else min(99, 100 * self._done // max(self._total, 1))
        text = f"{self._step:<13}{share:>4}%"
        if self._unit:
            text += f"  {_amount(self._done, 9)}{self._unit}  {_amount(rate, 7)}{self._unit}/s"
        if finished:
            text += f"  in {duration(seconds)}"
        elif rate > 0:
            text += f"  {duration((self._total - self._done) / rate)} left"
        else:
            text += f"  for {duration(seconds)} now"
        return Text(text, no_wrap=True, overflow="ellipsis")

    @contextmanager
    def show(self) -> Iterator[None]:
        """Keeps the line on the screen while the step runs, and prints what the step took at its end."""
        if self._console.is_terminal:
            with Live(get_renderable=self.line, console=self._console, refresh_per_second=4, transient=True):
                yield
        else:
            with self._printed_at_times():
                yield
        self._console.print(self.line(finished=True))

    @contextmanager
    def _printed_at_times(self) -> Iterator[None]:
        """Prints the line now and then while the step runs, also where nothing gets done: one task may take long."""
        ended = threading.Event()

        def print_lines() -> None:
            while not ended.wait(SECONDS_BETWEEN_LINES):
                self._console.print(self.line())

        thread = threading.Thread(target=print_lines, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _amount(number: float, width: int) -> str:
    """Spells an amount or a rate before its unit, in millions where it has any to speak of."""
    millions = number >= 1e5 or not number
    return f"{number / 1e6:>{width},.1f} M" if millions else f"{number:>{width},.{0 if number >= 10 else 1}f} "


def duration(seconds: float) -> str:
    """Spells a number of seconds as a person would say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02} m" if minutes >= 60 else f"{minutes} m {int(seconds % 60):02} s"
