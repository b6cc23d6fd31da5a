"""What is shown at a terminal, or through mpirun, whose ranks have a pseudo-terminal too; and the line of a step."""

import io
import os
import pty
import re
import sys
import time

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.commands import wait_for

from data_prep.common import progress
from data_prep.common.errors import UserError
from data_prep.common.progress import StepProgress
from data_prep.common.terminal import open_console


@pytest.mark.parametrize(
    ("name", "shown"),
    [("RANK", b"\x1b[31mplain"), ("OMPI_COMM_WORLD_SIZE", b"plain\r\n"), ("MPI_LOCALNRANKS", b"plain\r\n")],
)
def test_a_terminal_has_colours_and_a_rank_of_mpirun_has_none(
    name: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_side, terminal = pty.openpty()
    for each in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, "1")
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        open_console().print("[red]plain[/red]")
    assert os.read(other_side, 4096).startswith(shown)
    os.close(other_side)


def test_what_files_say_commands_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    title, shown = "a\x1b]0;b\x07\x9bc\u202ed\udc9b", "a\\x1b]0;b\\x07\\x9bc\\u202ed\\udc9b"
    table = Table(show_header=False, box=None)
    table.add_row(title, "كتاب\u200f")
    console = open_console(soft_wrap=True)
    console.print(title, markup=False)
    console.print(table)
    console.print(Text("[\x1b[2J]"))
    assert capsys.readouterr().out.split() == [shown, shown, "كتاب\u200f", "[\\x1b[2J]"]
    assert str(UserError(f"{title}\n\tdamaged")) == f"{shown}\n\tdamaged"


def test_a_slow_rate_is_no_rate_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for done, seconds, told in (
        (40, 80, "40 documents 0.5 documents/s"),
        (90_000, 10, "90,000 documents 9,000 documents/s"),
        (12_000_000, 10, "12.0 Mdocuments 1.2 Mdocuments/s"),
    ):
        step = StepProgress(Console(), "near copies", "documents", 10**9, 0)
        step.advance(done)
        with monkeypatch.context() as later:
            later.setattr(time, "monotonic", lambda step=step, seconds=seconds: step._start + seconds)
            assert told in " ".join(str(step.line()).split())


def test_a_step_of_one_long_task_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.02)
    text = io.StringIO()
    with StepProgress(Console(file=text), "documents", "B", 100, 0).show():
        wait_for(lambda: text.getvalue().count("\n") >= 2)
        lines = text.getvalue().splitlines()
    assert all(re.fullmatch(r"documents +0%  .* for [\d.]+ s now", line.rstrip()) for line in lines)
