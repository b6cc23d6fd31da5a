"""A terminal that is closed saves and ends a run, unless under nohup; a pipe without a reader ends no work."""

from __future__ import annotations

import os
import pty
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support.commands import block_all_signals
from support.faults import hold_before
from support.finetuning import Toy
from support.processes import ROOT, Run, start, wait_for
from support.training import COMMAND, SAVES, Place, assert_same, assert_well, records, train

from data_prep.common.codes import ENDED, Code
from data_prep.common.files import read_json
from data_prep.shards import WORK
from pretraining.checkpoint.record import list_finished

RUN_TASK, SHARD = ROOT / "finetuning" / "run_task.py", ROOT / "data_prep" / "shard.py"


def be_entry(
    entry: Path, words: Sequence[str], output: str, nohup: bool, fault: Callable[[], None] | None = None
) -> None:
    """What a rank does: the entry as a program, with all signals blocked by its starter; rank 0 on a terminal or pipe.

    The first terminal that a leader of a session opens is its own: the rank hears SIGHUP when that is closed.
    """
    if os.environ["RANK"] == "0":
        terminal = output.startswith("/dev/")
        stream = os.open(output, os.O_RDWR if terminal else os.O_WRONLY)
        for number in (1, 2) if terminal else (1,):
            os.dup2(stream, number)
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    block_all_signals()
    if fault is not None:
        fault()
    sys.argv = [str(entry), *words]
    runpy.run_path(str(entry), run_name="__main__")


@contextmanager
def on_terminal(
    entry: Path, words: Sequence[str], ranks: int = 1, nohup: bool = False, fault: Callable[[], None] | None = None
) -> Iterator[Run]:
    """An entry on a terminal, which is closed at the end of the block."""
    person, terminal = pty.openpty()
    yield start(ranks, be_entry, entry, list(words), os.ttyname(terminal), nohup, fault)
    os.close(terminal)
    os.close(person)


def steps_of(run: Path) -> int:
    return len(records(run)) if (run / "metrics.jsonl").exists() else 0


def test_a_closed_terminal_saves_and_ends(place: Place, straight: Path) -> None:
    command, run = place.command("run", *SAVES, "--checkpoints.every", "0"), place.folder / "run"
    gate = place.folder / "gate"
    with on_terminal(COMMAND, command, ranks=2, fault=partial(hold_before, 4, gate)) as going:
        wait_for(gate.with_suffix(".held").exists)
    gate.touch()
    assert [rank.code for rank in going.wait()] == [Code.STOPPED] * 2
    assert read_json(run / ENDED)["code"] == Code.STOPPED
    assert [path.name for path in list_finished(run)] == [f"step-{steps_of(run):08}"]
    assert_well(train(command))
    assert_same(run, straight)


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(place: Place, straight: Path) -> None:
    run, gate = place.folder / "run", place.folder / "gate"
    held = partial(hold_before, 4, gate)
    with on_terminal(COMMAND, place.command("run", *SAVES), ranks=2, nohup=True, fault=held) as going:
        wait_for(gate.with_suffix(".held").exists)
    gate.touch()
    assert [rank.code for rank in going.wait()] == [Code.DONE] * 2
    notes = [str(note["text"]) for note in records(run, "note")]
    assert [text.split(" any more")[0] for text in notes] == [
        "nobody reads standard output",
        "nobody reads standard error",
    ]
    assert_same(run, straight)


@pytest.mark.slow
def test_a_reader_who_leaves_takes_no_work_along(place: Place, straight: Path) -> None:
    """As `train.py | head -n 1`."""
    pipe, run, gate = (place.folder / name for name in ("pipe", "run", "gate"))
    os.mkfifo(pipe)
    held = partial(hold_before, 4, gate)
    going = start(2, be_entry, COMMAND, place.command("run", *SAVES), str(pipe), False, held)
    with pipe.open() as reader:
        assert reader.readline()
    gate.touch()
    done = going.wait()
    assert [rank.code for rank in done] == [Code.DONE] * 2
    [note] = records(run, "note")
    assert [rank.errors for rank in done] == [f"warning: {note['text']}\n", ""]
    assert_same(run, straight)


@pytest.mark.slow
def test_fine_tuning_on_a_closed_terminal(toy: Toy) -> None:
    command, run = toy.command("run", "--epochs", "400"), toy.folder / "run"
    with on_terminal(RUN_TASK, command) as going:
        wait_for(lambda: any(run.rglob("metrics.jsonl")))
    assert [rank.code for rank in going.wait()] == [Code.STOPPED]
    assert read_json(run / ENDED)["code"] == Code.STOPPED


@pytest.mark.slow
def test_making_shards_on_a_closed_terminal(wiki: Path, tmp_path: Path) -> None:
    words = ["--docs", str(wiki), "--out", str(tmp_path / "out"), "--vocab-size", "500", "--workers", "2"]
    with on_terminal(SHARD, [*words, "--duplicates", "200"]) as going:
        wait_for((tmp_path / "out" / WORK).exists)
    assert [rank.code for rank in going.wait()] == [130]


@pytest.mark.slow
def test_shards_are_made_where_all_signals_are_blocked(wiki: Path, tmp_path: Path) -> None:
    """The end of a child is a signal too, on which the process waits that watches over it."""
    words = ["--docs", str(wiki), "--out", str(tmp_path / "out"), "--vocab-size", "500", "--workers", "2"]
    going = start(1, be_entry, SHARD, words, os.devnull, False)
    assert [rank.code for rank in going.wait()] == [0]
    assert (tmp_path / "out/manifest.json").exists()
