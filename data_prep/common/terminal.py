"""Consoles of the entries, and whether a person looks at them.

Under mpirun a rank's output is a pseudo-terminal although mpirun passes it on as lines, often into a file. Colours
and bars that change in place would end there as control characters, so nothing under an MPI launcher counts as a
terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from data_prep.common.errors import UserError, printable
from data_prep.common.launchers import started_by_mpi

WIDTH = 140
"""Columns of tables where no terminal says how many it has."""


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at this stream, so that what is written may have colours and change in place."""
    return stream.isatty() and not started_by_mpi()


def say_at_once(text: str) -> None:
    """Prints a line where a person looks, before a command loads what it needs: on the first rank alone."""
    if is_terminal(sys.stdout) and os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


class PlainConsole(Console):
    """A console on which text from files is text: titles and names command no terminal."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)

    def render(self, *what: Any, **how: Any) -> Iterator[Segment]:
        for text, style, control in super().render(*what, **how):
            yield Segment(text if control else printable(text), style, control)


def open_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console on one of the process's streams, which is plain where no person looks at it."""
    plain: dict[str, Any] = {"force_terminal": False, "color_system": None} if started_by_mpi() else {}
    width = None if is_terminal(sys.stderr if stderr else sys.stdout) else WIDTH
    return PlainConsole(stderr=stderr, highlight=False, width=width, **plain, **options)


def run_curable(work: Callable[[], int | None]) -> int:
    """Does the work of a command; returns its exit code: that of the work, 2 for an error of its user, which it
    prints, or 130 after a Ctrl-C."""
    try:
        return work() or 0
    except (UserError, OSError) as error:  # such as a disk that is full, a file that must not be read
        errors = open_console(stderr=True, soft_wrap=True)
        errors.print(f"error: {error}", markup=False, style="red" if errors.is_terminal else "")
        return 2
    except KeyboardInterrupt:
        return 130


def make_table(*columns: str, **options: Any) -> Table:
    """Makes a plain table; columns whose names begin with > are right-aligned."""
    table = Table(box=None, pad_edge=False, **options)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table
