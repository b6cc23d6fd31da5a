"""What records share on the console: lines in files and pipes, and panels that change in place in a terminal."""

from __future__ import annotations

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from data_prep.common.progress import duration


def left(seconds: float | None) -> list[str]:
    """How long a run will still take; nothing where that is not known."""
    return [] if seconds is None else [f"{duration(seconds)} left"]


def progress(title: str, done: int, total: int, seconds_left: float | None, width: int) -> Table:
    """How far a run is, in one line with a bar; without a bar where the total is 0, since the clock decides."""
    table, time_left = Table.grid(padding=(0, 1)), "".join(left(seconds_left))
    if not total:
        table.add_row(f"{title} {done:,} ", time_left)
        return table
    title = f"{title} {done:,} of {total:,}"
    bar = ProgressBar(total, done, width=max(10, min(40, width - len(title) - len(time_left) - 10)))
    table.add_row(title, bar, f"{done / total:.0%}", time_left)
    return table


def cropped(line: str) -> Text:
    """A line of a panel, cut off where the terminal ends."""
    return Text(line, no_wrap=True, overflow="ellipsis")


def number(value: float) -> str:
    """Three figures and a unit: 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            value /= size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{value:.0f}"
