"""What is shown at a terminal, or through mpirun, whose ranks have a pseudo-terminal too; and the line of a step."""

from __future__ import annotations

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
from support.processes import ROOT

from data_prep.common import progress
from data_prep.common.errors import UserError
from data_prep.common.progress import StepProgress
from data_prep.common.terminal import open_console

PROGRAM = "from data_prep.common.terminal import open_console; open_console().print('[red]plain[/red]')"


def printed_in_a_terminal(environment: dict[str, str]) -> bytes:
    """What a console prints where its output is a pseudo-terminal."""
    pid, terminal = pty.fork()
    if not pid:
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        os.execve(sys.executable, [sys.executable, "-c", PROGRAM], {**kept, "TERM": "xterm", **environment})
    seen = b""
    try:
        while part := os.read(terminal, 4096):
            seen += part
    except OSError:  # as Linux says that the other side is closed
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return seen


def test_a_terminal_has_colours_and_a_rank_of_mpirun_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert b"\x1b[31mplain" in printed_in_a_terminal({"RANK": "0", "SLURM_PROCID": "0"})
    for variable in ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        assert printed_in_a_terminal({variable: "1"}) == b"plain\r\n"


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
