"""Formats progress for the console: lines for files and pipes, panels for terminals."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration


def format_seconds_left(seconds: float | None) -> list[str]:
    """Formats the time that a run will still take; empty if unknown."""
    return [] if seconds is None else [f"{duration(seconds)} left"]


def draw_progress(title: str, done: int, total: int, seconds_left: float | None, width: int) -> Table:
    """Draws progress in one line with a bar; without a bar if the total is 0, since the run goes by the clock."""
    table, time_left = Table.grid(padding=(0, 1)), "".join(format_seconds_left(seconds_left))
    if not total:
        table.add_row(f"{title} {done:,} ", time_left)
        return table
    title = f"{title} {done:,} of {total:,}"
    bar = ProgressBar(total, done, width=max(10, min(40, width - len(title) - len(time_left) - 10)))
    table.add_row(title, bar, f"{done / total:.0%}", time_left)
    return table


def crop(line: str) -> Text:
    """Crops a line of a panel at the width of the terminal."""
    return Text(line, no_wrap=True, overflow="ellipsis")


class Waiting:
    """A line that says for how long something has been going on, updated whenever it is drawn."""

    def __init__(self, what: str) -> None:
        self._what, self._begin = what, time.monotonic()

    def __rich__(self) -> Text:
        return crop(f"{self._what}: {duration(time.monotonic() - self._begin)}")


def show_waiting(console: Console, what: str, active: bool = True) -> AbstractContextManager[object]:
    """Shows in a terminal what is going on and for how long; `active` on one rank only."""
    if not (active and console.is_terminal):
        return nullcontext()
    return Live(Waiting(what), console=console, transient=True)


def format_number(value: float) -> str:
    """Formats a number with three digits and a unit: 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            value /= size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{value:.0f}"
