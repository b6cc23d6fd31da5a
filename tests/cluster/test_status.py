"""How runs are doing, as a user reads it: real runs of seconds, a queue that is pretended, and damage in between."""

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console
from support.processes import wait_for
from support.training import ENDLESS, Place, launch, records, stopped_at

from cluster import jobs
from cluster.jobs import JOBS, Queue, read_notes
from cluster.panels import panel
from cluster.runs import RunStatus, find_runs, read_run
from cluster.status import Observer, fitting, main
from data_prep.common.files import write_json
from pretraining.checkpoint.record import RECIPE, finished_checkpoints
from pretraining.processes.codes import ENDED
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.skips import Skip, write_skips

ENTRY = ROOT / "cluster" / "status.py"
Look = Callable[..., str]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Calls the command, which must end well, and returns what it prints."""

    def call(*words: object) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A finished run, to be changed."""
    return shutil.copytree(straight, tmp_path / "runs" / "one")


def status(run: Path, later: float = 0.0, queue: Queue | None = None) -> RunStatus:
    """Where a run stands, so many seconds from now."""
    return read_run(run, read_notes(run), queue or Queue(None), time.time() + later)


def shown(status: RunStatus, width: int) -> list[str]:
    """The lines of a run's panel in a terminal of this width."""
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=True, color_system=None).print(panel(status, width))
    return output.getvalue().splitlines()


def note(run: Path, *events: dict[str, Any], torn: str = "") -> None:
    """Notes what job scripts note."""
    run.mkdir(parents=True, exist_ok=True)
    (run / JOBS).write_text("".join(json.dumps(event) + "\n" for event in events) + torn)


def start(job: str, restart: int = 0, ago: float = 60.0) -> dict[str, Any]:
    fields = {"event": "start", "time": int(time.time() - ago), "job": job, "restart": restart}
    return {**fields, "nodes": "node[1-2]", "checkpoint": ""}


def end(job: str, code: int) -> dict[str, Any]:
    return {"event": "end", "time": int(time.time()), "job": job, "restart": 0, "code": code}


def make_running(run: Path) -> None:
    """Makes of a finished run one that has just written its last line, and does not know its end."""
    (run / ENDED).unlink(missing_ok=True)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    now = time.time()
    os.utime(run / RECIPE, (now - 100, now - 100))
    (run / METRICS).write_text("".join(json.dumps({**line, "time": now}) + "\n" for line in lines))


# Runs without jobs.


def test_a_finished_run(straight: Path, look: Look) -> None:
    text, last, scored = look(straight), records(straight)[-1], records(straight, "evaluation")[-1]
    assert re.search(rf"^{straight}  done  .* ago$", text, re.MULTILINE)
    assert "step 8 of 8" in text
    assert "2 of 2: long, length 64" in text
    assert f"{last['loss']:.4f}   validation {scored['masked_loss'] + scored['next_loss']:.4f} at step 8\n" in strip(
        text
    )
    assert re.search(r"pieces/s   use \d+%   wait \d+%\n", strip(text))
    assert re.search(r"last line .* ago   checkpoint .* ago, of step 8\n", strip(text))
    for absent in ("left", "job", "restarts", "went back", "ended with", "\x1b"):
        assert absent not in text


def strip(text: str) -> str:
    """The text without the blanks at the ends of its lines."""
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def test_a_run_that_trains_then_falls_silent_or_is_stopped(place: Place, look: Look) -> None:
    run = place.folder / "run"
    training = launch(place.command("run", *ENDLESS), ranks=1)
    wait_for((run / METRICS).exists)
    assert status(run).state in ("starting", "running")
    training.reach(3)
    now = status(run)
    assert (now.state, now.phase, now.phase_name, now.total_steps) == ("running", 1, "short", 5003)
    assert now.step >= 3
    assert re.search(r"of 5003 .* left", re.sub(",", "", look(run)))
    assert status(run, later=100).state == "running"
    assert status(run, later=200).state == "silent"
    training.signal(signal.SIGTERM)
    training.wait()
    text = strip(look(run))
    assert re.search(r"run  stopped  .* ago\n", text)
    assert "ended with  75 (saved and stopped): stopped by a signal after step" in text
    saved = finished_checkpoints(run)[-1].name.removeprefix("step-").lstrip("0")
    assert f"of step {saved}\n" in text


def test_a_run_is_silent_only_where_its_own_lines_come_faster(run: Path) -> None:
    make_running(run)
    slow = [json.dumps({**line, "seconds_per_step": 300.0}) for line in records(run)]
    assert status(run, later=500).state == "silent"
    (run / METRICS).write_text("\n".join(slow) + "\n")
    assert status(run, later=500).state == "running"
    assert status(run, later=1000).state == "silent"
    assert "no line for 16 m" in status(run, later=1000).why


def test_a_run_without_a_step_is_starting(straight: Path, tmp_path: Path, look: Look) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copyfile(straight / RECIPE, run / RECIPE)
    (run / METRICS).touch()
    text = look(run)
    assert re.search(r"run  starting  since \d", text)
    assert "step 0 of 8" in text
    assert "1 of 2: short, length 32" in text
    assert status(run, later=3600).state == "silent"


def test_a_failed_run_says_why(run: Path, look: Look) -> None:
    reason = "checkpoints: cannot be written: No space left on device\nmake room, or keep fewer checkpoints"
    write_json(run / ENDED, {"code": 2, "reason": reason, "rank": 1, "time": "2026-01-01T00:00:00+00:00"})
    text = strip(look(run))
    assert re.search(r"one  failed  \d+ days ago\n", text)
    for line in ("2 (something must be mended first): checkpoints: cannot be written", "make room, or keep fewer"):
        assert line in text


def test_a_run_that_stopped_after_the_phase_that_was_asked_for_is_not_done(straight: Path, tmp_path: Path) -> None:
    run = stopped_at(straight, tmp_path / "run", 5)
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in records(straight)[:5]))
    now = status(run)
    assert (now.state, now.step, now.total_steps) == ("stopped", 5, 8)
    assert now.why.endswith("ago, where it was told to stop")


def test_damage_stops_nothing(run: Path) -> None:
    whole = status(run)
    with (run / METRICS).open("ab") as file:
        file.write(b'{"kind": "step", "step": 9, "lo')
    torn = status(run)
    assert (torn.last_line, torn.losses) == (whole.last_line, whole.losses)
    for name in (ENDED, RECIPE, "skipped.json", JOBS):
        (run / name).write_bytes(b'{"torn')
    assert (status(run).last_line, status(run).state) == (whole.last_line, "starting"), "its recipe was just written"
    for name in (ENDED, RECIPE, "skipped.json", JOBS):
        (run / name).unlink()
    bare = status(run)
    assert (bare.step, bare.total_steps, bare.phases) == (8, 0, 0)
    assert any("step 8" in line for line in shown(bare, 80))


def test_a_run_of_an_earlier_version(run: Path, look: Look) -> None:
    """Whose lines have other names and no time, and whose recipe has names that are no more."""
    old = {"loss": 6.1, "masked": 5.4, "rate": 2e-3, "pieces_per_second": 3982.7, "utilisation": 1e-4, "seconds": 0.2}
    (run / METRICS).write_text(json.dumps({"kind": "step", "step": 2, "phase": 1, **old}) + "\n")
    (run / RECIPE).write_text((run / RECIPE).read_text().replace("learning_rate", "rate") + "[fleet]\nships = 3\n")
    text = look(run)
    assert "1 of 2: short, length 32" in text
    assert "6.1000" in text
    assert "3983 pieces/s" in text or "3.98k pieces/s" in text
    assert "use" not in text


def test_a_run_that_went_back(run: Path, look: Look) -> None:
    again = [json.dumps({**line, "loss": 1.0}) for line in records(run)[5:]]
    with (run / METRICS).open("a") as file:
        file.write("\n".join(again) + "\n")
    write_skips(run, [Skip(1, 0, 2, "the loss leapt to 9.02 in the steps to 7")])
    now = status(run)
    assert [step for step, _ in now.losses] == list(range(1, 9))
    assert [loss for _, loss in now.losses[5:]] == [1.0] * 3
    assert "went back   1 time to a checkpoint, the last since the loss leapt to 9.02 in the steps to 7" in strip(
        look(run)
    )


def test_by_the_clock_there_is_no_total(run: Path, look: Look) -> None:
    recipe = re.sub(r"^steps = \d+\n", "share = 0.5\n", (run / RECIPE).read_text(), flags=re.MULTILINE)
    (run / RECIPE).write_text("hours = 24.0\n" + recipe)
    make_running(run)
    text = look(run)
    assert "step 8 " in text
    assert " of 8" not in text
    assert "left" in text


def test_the_curve_falls_from_the_top_to_the_bottom(run: Path) -> None:
    with (run / METRICS).open("w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"kind": "step", "step": step, "phase": 1, "loss": 11 - step / 100}) + "\n")
    lines = shown(status(run), 80)[-4:-1]
    top, _, bottom = (re.sub("[^▁▂▃▄▅▆▇█]", "", line) for line in lines)
    assert re.search(r"≥ 10\.0\d  █", lines[0])
    assert re.search(r"  1\.\d\d  █", lines[2])
    assert len(top) < 40 < 60 < len(bottom), "it fills the width"
    assert (top[0], bottom[-1]) == ("█", "▁")
    assert list(bottom) == sorted(bottom, reverse=True)


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_into_the_terminal(width: int, run: Path) -> None:
    note(run, start("123_4"), end("123_4", 75), start("123_4", 1))
    write_json(run / ENDED, {"code": 76, "reason": "word " * 60, "rank": 1, "time": "2099-01-01T00:00:00+00:00"})
    write_skips(run, [Skip(1, 0, 2, "the loss leapt " * 10)])
    queue = Queue({"123_4": jobs.Job("123_4", "COMPLETING", "None", "node[001-128]")})
    lines = shown(status(run, queue=queue), width)
    assert max(map(len, lines)) <= width
    assert len(lines) > 12


# Several runs.


def test_runs_are_found_the_newest_last_and_without_fine_tuning(straight: Path, tmp_path: Path, look: Look) -> None:
    runs = tmp_path / "runs"
    for number, name in enumerate(("b", "deeper/a", "c")):
        shutil.copytree(straight, runs / name)
        os.utime(runs / name / METRICS, (1000 + number, 1000 + number))
    for task in (runs / "b" / "glue" / "sst2" / "lr1", runs / "tuned" / "sst2" / "lr1", runs / "tuned"):
        task.mkdir(parents=True, exist_ok=True)
        (task / METRICS).write_text('{"kind": "step", "step": 1, "epoch": 0.5, "loss": 0.7}\n')
    note(runs / "script", start("7"))
    (runs / "script2" / "sst2" / "lr1").mkdir(parents=True)
    (runs / "script2" / "sst2" / "lr1" / "begun.json").touch()
    note(runs / "script2", start("8"))
    assert find_runs(runs) == [runs / "b", runs / "deeper/a", runs / "c", runs / "script"]
    text = look(runs / "c", runs)
    assert re.findall(rf"^{runs}/(\S+)", text, re.MULTILINE) == ["c", "b", "deeper/a", "script"], "each once"


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


def test_json_has_the_same_for_scripts(run: Path, look: Look) -> None:
    note(run, start("5", ago=9e9), end("5", 75), start("6", 1, ago=9e9))
    [read] = json.loads(look(run, "--json"))
    assert (read["run"], read["state"], read["step"], read["total_steps"]) == (str(run), "done", 8, 8)
    assert read["last_line"] == records(run)[-1]
    assert read["last_evaluation"] == records(run, "evaluation")[-1]
    assert (read["ended"]["code"], read["checkpoint"]) == (0, 8)
    assert (read["notes"]["restarts"], read["notes"]["code_before"], read["notes"]["job"]) == (1, 75, "6")
    assert [step for step, _ in read["losses"]] == list(range(1, 9))


# Jobs.


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a program called squeue on the path; returns the file in which it notes its arguments."""

    def pretend(does: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {folder / "calls"}\n{does}\n')
        (folder / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder / "calls"

    return pretend


def test_one_question_to_the_queue_for_all_runs(straight: Path, tmp_path: Path, look: Look, squeue: Any) -> None:
    runs = tmp_path / "runs"
    for name, job in (("a", "11"), ("b", "12_3"), ("c", "13")):
        make_running(shutil.copytree(straight, runs / name))
        note(runs / name, start(job))
    calls = squeue("echo '11|RUNNING|None|node[1-2]'; echo '12_3|PENDING|Resources|'")
    text = strip(look(runs))
    assert re.search(r"/a  running\n", text)
    assert "job         11 RUNNING on node[1-2]\n" in text
    assert re.search(r"/b  queued  \(Resources\)\n", text)
    assert "job         12_3 PENDING: Resources\n" in text
    assert re.search(r"/c  silent  job 13 is not in the queue, and noted no end\n", text)
    assert text.count("restarts    none\n") == 3
    [words] = calls.read_text().splitlines()
    assert "--jobs=11,12_3,13" in words


def test_restarts_and_how_the_one_before_ended(run: Path) -> None:
    make_running(run)
    note(run, start("5", 0), end("5", 75), start("5", 1), torn='{"event": "en')
    assert "restarts    1, the last after 75 (saved and stopped)" in "\n".join(shown(status(run), 80))
    note(run, start("5", 0), end("5", 75), start("5", 1), start("5", 2))
    assert "restarts    2, the last after an end that was not noted" in "\n".join(shown(status(run), 80))


def test_a_job_that_was_killed_has_failed(run: Path) -> None:
    make_running(run)
    note(run, start("5"), end("5", 137))
    now = status(run)
    assert now.state == "failed"
    assert now.why == "job 5 has ended with 137 (killed by SIGKILL); its output says why"


def test_what_ended_before_the_last_start_is_out_of_date(run: Path) -> None:
    note(run, start("5", ago=9e9), end("5", 0), start("6", 1, ago=-5))
    assert status(run, later=10).state == "starting"
    assert status(run).ended is None


def test_a_job_that_has_just_begun_has_no_more_than_its_notes(tmp_path: Path, look: Look, squeue: Any) -> None:
    note(tmp_path / "run", start("5"))
    squeue("echo '5|RUNNING|None|node1'")
    text = strip(look(tmp_path / "run"))
    assert re.search(r"run  starting  since 1 m 0\d s\n  progress    step 0\n  job         5 RUNNING on node1\n", text)


def test_a_job_that_the_queue_no_longer_knows(run: Path, look: Look, squeue: Any) -> None:
    note(run, start("5", ago=9e9), end("5", 0))
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    text = look(run)
    assert "done" in text
    assert "warning" not in text


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("exec sleep 60", "warning: squeue did not answer within 0.3 s"),
        ("echo 'squeue: error: no controller' >&2; exit 1", "warning: squeue: error: no controller;"),
        ("exit 3", "warning: squeue: exit code 3;"),
    ],
)
def test_a_queue_that_does_not_answer_hides_nothing_else(
    does: str, told: str, run: Path, squeue: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 0.3)
    make_running(run)
    note(run, start("5"))
    squeue(does)
    for words in ([], ["--json"]):
        assert main([str(run), *words]) == 0
        printed = capsys.readouterr()
        assert told in (printed.err if words else printed.out)
        assert "running" in printed.out
        assert "silent" not in printed.out, "nobody said that the job is gone"


# The process.


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
    _, code = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(code) == 130
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


def test_who_watches_asks_the_queue_only_now_and_then(run: Path, squeue: Any) -> None:
    note(run, start("5"))
    calls = squeue("echo '5|RUNNING|None|node1'")
    observer = Observer((run,))
    assert [observer.look()[0].job for _ in range(3)] == [jobs.Job("5", "RUNNING", "None", "node1")] * 3
    assert len(calls.read_text().splitlines()) == 1
    note(run, start("6"))
    observer.look()
    assert "--jobs=6" in calls.read_text().splitlines()[1], "another job is asked about at once"


def test_a_low_window_shows_the_newest_runs(run: Path) -> None:
    panels = [panel(status(run), 80)] * 3
    for height, told in ((15, "2 more above"), (30, "1 more above")):
        output = io.StringIO()
        console = Console(file=output, width=80, height=height)
        console.print(*fitting(panels, console), sep="\n")
        assert output.getvalue().startswith(told)
        assert len(output.getvalue().splitlines()) < height
    assert fitting(panels, Console(width=80, height=60)) == panels
