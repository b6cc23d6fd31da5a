"""A terminal that is closed saves and ends a run, unless under nohup; a pipe without a reader ends no work."""

import os
import pty
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.commands import block_all_signals, wait_for
from support.faults import hold_before
from support.marks import slow
from support.processes import start
from support.training import COMMAND, SAVES, Place, assert_same, records

from data_prep.common.codes import ENDED, Code
from data_prep.common.files import read_json
from pretraining.checkpoint.record import list_finished


def be_program(words: Sequence[str], output: str, nohup: bool, gate: Path) -> None:
    """What a rank does: train.py as a program, with all signals blocked by its starter, which is held before step 4;
    rank 0 on a terminal or pipe.

    The first terminal that a leader of a session opens is its own: the rank hears SIGHUP when that is closed.
    """
    if os.environ["RANK"] == "0":
        terminal = output.startswith("/dev/pts/")
        stream = os.open(output, os.O_RDWR if terminal else os.O_WRONLY)
        for number in (1, 2) if terminal else (1,):
            os.dup2(stream, number)
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    block_all_signals()
    hold_before(4, gate)
    sys.argv = [str(COMMAND), *words]
    runpy.run_path(str(COMMAND), run_name="__main__")


@pytest.mark.parametrize("nohup", [False, slow(True)])
def test_a_closed_terminal_saves_and_ends(place: Place, straight: Path, nohup: bool) -> None:
    """Under nohup it is only noted."""
    command, run, gate = place.command("run", *SAVES), place.folder / "run", place.folder / "gate"
    person, terminal = pty.openpty()
    going = start(2, be_program, command, os.ttyname(terminal), nohup, gate)
    wait_for(gate.with_suffix(".held").exists)
    os.close(terminal)
    os.close(person)
    gate.touch()
    code = Code.DONE if nohup else Code.STOPPED
    assert [rank.code for rank in going.wait()] == [code] * 2
    assert read_json(run / ENDED)["code"] == code
    if nohup:
        assert_same(run, straight)
        notes = [str(note["text"]).partition(" any more")[0] for note in records(run, "note")]
        assert notes == ["nobody reads standard output", "nobody reads standard error"]
    else:
        steps = len(records(run)) if (run / "metrics.jsonl").exists() else 0
        assert list_finished(run)[-1].name == f"step-{steps:08}"


@pytest.mark.slow
def test_a_reader_who_leaves_takes_no_work_along(place: Place, straight: Path) -> None:
    """As `train.py | head -n 1`."""
    pipe, run, gate = (place.folder / name for name in ("pipe", "run", "gate"))
    os.mkfifo(pipe)
    going = start(2, be_program, place.command("run", *SAVES), str(pipe), False, gate)
    with pipe.open() as reader:
        assert reader.readline()
    gate.touch()
    done = going.wait()
    assert [rank.code for rank in done] == [Code.DONE] * 2
    [note] = records(run, "note")
    assert [rank.errors for rank in done] == [f"warning: {note['text']}\n", ""]
    assert_same(run, straight)
