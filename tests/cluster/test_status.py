"""status.py as a user starts it: on one run, on many, for scripts, in a pipe and in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import ROOT
from rich.console import Console
from support.processes import wait_for
from support.run_folders import Look, end, make_running, note, start, status, strip
from support.training import records

from cluster.panels import build_panel
from cluster.status import fit_panels, main
from pretraining.model.shape import Shape
from pretraining.processes.context import Context
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.request import Request
from pretraining.training.run import finish_run

pytest_plugins = ["support.run_fixtures"]

ENTRY = ROOT / "cluster" / "status.py"


def test_a_finished_run(straight: Path, look: Look) -> None:
    text = strip(look(straight))
    last, scored = records(straight)[-1], records(straight, "evaluation")[-1]
    validation = scored["masked_loss"] + scored["next_loss"]
    assert re.search(rf"^{straight}  done  .* ago$", text, re.MULTILINE)
    assert "step 8 of 8" in text
    assert "2 of 2: long, length 64" in text
    assert f"loss        {last['loss']:.4f}   validation {validation:.4f} at step 8\n" in text
    assert re.search(r"pieces/s   use \d+%   wait \d+%\n", text)
    assert re.search(r"last line .* ago   checkpoint .* ago, of step 8\n", text)
    for absent in ("left", "job", "restarts", "went back", "ended with", "\x1b"):
        assert absent not in text


def test_without_a_name_those_below_runs(run: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert look().startswith("runs/one  done")


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_runs_is_told_with_the_cure(made: bool, tmp_path: Path, capsys: Any) -> None:
    if made:
        (tmp_path / "none").mkdir()
    assert main([str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / 'none'}: no ")
    assert "name the folder that train.py had as --out" in told


def test_options_that_make_no_sense_are_refused(run: Path, capsys: Any) -> None:
    assert main([str(run), "--watch", "--every", "0"]) == 2
    assert main([str(run), "--watch", "--json"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_the_losses_of_a_run_are_drawn_at_its_end_and_when_asked_for(
    run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(run), "--charts"]) == 0
    drawn = (run / "loss.png").read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    (run / "loss.png").unlink()
    context = cast(Context, SimpleNamespace(console=Console()))
    request = cast(Request, SimpleNamespace(out=run, shape=Shape.from_size("tiny", 100)))
    finish_run(request, context, trained_now=False)
    assert not (run / "loss.png").exists(), "8 steps were a trial"
    monkeypatch.setattr("pretraining.training.run.TRIAL", 8)
    finish_run(request, context, trained_now=False)
    assert (run / "loss.png").read_bytes() == drawn
    (run / METRICS).write_text("")
    assert main([str(run), "--charts"]) == 0
    assert f"{run}/loss.png: not drawn: 0 logged steps" in capsys.readouterr().out


def test_json_has_the_same_for_scripts(run: Path, look: Look) -> None:
    note(run, start("5", ago=9e9), end("5", 75), start("6", 1, ago=9e9))
    [read] = json.loads(look(run, "--json"))
    assert (read["run"], read["state"], read["step"], read["total_steps"]) == (str(run), "done", 8, 8)
    assert read["last_line"] == records(run)[-1]
    assert read["last_evaluation"] == records(run, "evaluation")[-1]
    assert (read["ended"]["code"], read["checkpoint"]) == (0, 8)
    assert (read["notes"]["restarts"], read["notes"]["code_before"], read["notes"]["job"]) == (1, 75, "6")
    assert [step for step, _ in read["losses"]] == list(range(1, 9))


def test_it_loads_nothing_heavy() -> None:
    heavy = {"torch", "deepspeed", "transformers", "numba", "numpy", "pyarrow"}
    code = f"import sys, cluster.status; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


def test_a_pipe_that_is_closed_and_a_terminal_without_colours(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, str(ENTRY), str(run)], capture_output=True, env=environment, check=True)
    assert b"done" in done.stdout
    assert done.stderr == b""
    assert b"\x1b" not in done.stdout


def test_watching_changes_in_place_until_ctrl_c(run: Path) -> None:
    make_running(run)
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which `nohup make test &` ignores, and children inherit that
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
        os.execve(sys.executable, [sys.executable, str(ENTRY), str(run), "--watch", "--every", "0.1"], environment)
    seen = b""

    def reads(text: bytes) -> bool:
        nonlocal seen
        seen += os.read(terminal, 65536)
        return text in seen

    wait_for(lambda: reads(b"step 8 of 8"))
    with (run / METRICS).open("a") as file:
        file.write(json.dumps({**records(run)[-1], "step": 9}) + "\n")
    wait_for(lambda: reads(b"step 9 of 8"))
    os.write(terminal, b"\x03")
    ended: list[int] = []

    def has_ended() -> bool:
        found, code = os.waitpid(pid, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(code)] * (found == pid))
        return bool(ended)

    wait_for(has_ended, 20)
    assert ended == [130]
    wait_for(lambda: reads(b"\x1b[?25h"), 5)
    os.close(terminal)
    assert b"\x1b[1A" in seen, "it goes back to the lines that it shows anew"
    assert b"Traceback" not in seen


def test_a_run_that_goes_while_it_is_watched_is_told(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ENTRY), str(run), "--watch", "--every", "0.1"]
    watching = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert "done" in watching.stdout.readline()
    shutil.rmtree(run)
    _, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors.splitlines()[0]) == (2, f"error: {run}: no such folder")


def test_a_low_window_shows_the_newest_runs(run: Path) -> None:
    panels = [build_panel(status(run), 80)] * 3
    for height, told in ((15, "2 more above"), (30, "1 more above")):
        output = io.StringIO()
        console = Console(file=output, width=80, height=height)
        console.print(*fit_panels(panels, console), sep="\n")
        assert output.getvalue().startswith(told)
        assert len(output.getvalue().splitlines()) < height
    assert fit_panels(panels, Console(width=80, height=60)) == panels
