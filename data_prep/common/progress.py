"""What a person sees while the work goes on, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0  # where the output is no terminal


class StepProgress:
    """The live line of one step."""

    def __init__(self, console: Console, step: str, unit: str, total: int, done: int) -> None:
        self._console, self._step, self._unit = console, step, unit
        self._total, self._done, self._before = total, done, done
        self._items = 0
        self._start = self._printed = time.monotonic()
        self._live: Live | None = None

    def advance(self, amount: int, items: int) -> None:
        """So much more is done: in the unit of the step, and in documents or examples."""
        self._done += amount
        self._items += items
        if self._live is not None:
            self._live.update(self.line())
        elif time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            self._console.print(self.line())

    def line(self, finished: bool = False) -> Text:
        """Step, share done, rates, time left."""
        seconds = max(time.monotonic() - self._start, 1e-3)
        rate = (self._done - self._before) / seconds
        share = 100 if finished else min(99, 100 * self._done // max(self._total, 1))
        text = f"{self._step:<11}{share:>4}%"
        if self._unit:
            text += f"  {self._done / 1e6:>9,.1f} M{self._unit}  {rate / 1e6:>7,.1f} M{self._unit}/s"
        if self._items:
            text += f"  {self._items:>10,} documents"
        if finished:
            text += f"  in {duration(seconds)}"
            if self._before:
                text += f" (and {self._before / 1e6:,.1f} M{self._unit} earlier)"
        elif rate > 0:
            text += f"  {duration((self._total - self._done) / rate)} left"
        return Text(text, no_wrap=True, overflow="ellipsis")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the line while the step runs, and once more at its end."""
        if self._console.is_terminal:
            with Live(self.line(), console=self._console, refresh_per_second=4, transient=True) as self._live:
                yield
        else:
            yield
        self._console.print(self.line(finished=True))


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60:02} m" if minutes >= 60 else f"{minutes} m {int(seconds % 60):02} s"


def closing_table(content: dict[str, Any]) -> Table:
    """The figures of a manifest."""
    corpus, sets = content["corpus"], content["sets"]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    held_out = f"{corpus['validation_documents']:,} held out for validation"
    table.add_row("documents", f"{corpus['documents']:,}", held_out)
    if corpus["skipped"] or corpus["empty"] or corpus["replaced"]:
        table.add_row(
            "  left out",
            f"{len(corpus['skipped']) + corpus['empty']:,}",
            f"{len(corpus['skipped']):,} unreadable, {corpus['empty']:,} without text; "
            f"bad characters replaced in {corpus['replaced']:,}",
        )
    table.add_row(
        "sentences", f"{corpus['sentences']:,}", f"{corpus['pieces'] / max(corpus['sentences'], 1):.1f} pieces each"
    )
    unknown = 100 * corpus["unknown"] / max(corpus["pieces"], 1)
    table.add_row("pieces", f"{corpus['pieces']:,}", f"{unknown:.3f}% of them [UNK]")
    for each in sets:
        _add_set(table, each)
    stored = sum(each["pieces"] for each in sets)
    size = content["bytes"]
    table.add_row("bytes", f"{size:,}", f"{size / max(stored, 1):.2f} for each of {stored:,} pieces stored")
    return table


def _add_set(table: Table, each: dict[str, Any]) -> None:
    """One row for a set of shards."""
    examples = max(each["examples"], 1)
    name = f"{each['length']} " + ("validation" if each["validation"] else f"duplicate {each['duplicate']}")
    fill = 100 * each["pieces"] / (examples * each["length"])
    random_next = 100 * each["random_next"] / examples
    split = "/".join(f"{100 * part / max(each['masked'], 1):.1f}" for part in each["split"])
    figures = f"examples, {fill:.1f}% full, {random_next:.1f}% random next, masked {split}"
    table.add_row(name, f"{each['examples']:,}", figures)
