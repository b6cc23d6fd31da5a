"""Who looks at what is written: a person at a terminal, or mpirun, whose ranks have a pseudo-terminal too."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from support.processes import ROOT, run_launcher

from data_prep.common import beginning
from data_prep.common.errors import UserError
from data_prep.common.launchers import started_by_mpi
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
    assert b"\x1b[31mplain" in printed_in_a_terminal({})
    for variable in ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        assert printed_in_a_terminal({variable: "1"}) == b"plain\r\n"


def test_which_launchers_pass_lines_on() -> None:
    assert not started_by_mpi({"RANK": "0", "SLURM_PROCID": "0"})
    assert started_by_mpi({"OMPI_COMM_WORLD_SIZE": "2"})


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


@pytest.mark.slow
def test_shards_made_under_mpirun_are_told_in_plain_lines(wiki: Path, tmp_path: Path) -> None:
    words = ["--docs", str(wiki), "--out", str(tmp_path / "data"), "--vocab-size", "300", "--lengths", "32"]
    entry = str(ROOT / "data_prep" / "shard.py")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, entry, *words]
    done = run_launcher(command, {"TERM": "xterm"}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is ready, in" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_folder_of_another_copy_commands_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "\x1b]0;planted" / "data_prep"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    for name in (beginning.TOLD, "PYTHONPATH", *beginning.RANKS):
        monkeypatch.setenv(name, "0")  # so that the end of this test undoes what is set
        monkeypatch.delenv(name)
    monkeypatch.chdir(other.parent)
    beginning.tell_other_copy()
    assert "\\x1b]0;planted" in (said := capsys.readouterr().err)
    assert "\x1b" not in said
