"""Formats progress for the console."""

from __future__ import annotations

from rich.progress_bar import ProgressBar
from rich.table import Table

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


def format_number(value: float) -> str:
    """Formats a number with three digits and a unit: 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            value /= size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{value:.0f}"
