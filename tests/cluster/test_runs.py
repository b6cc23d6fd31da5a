"""Where a run stands, as its folder alone tells: real runs of seconds, and what becomes of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from conftest import ROOT
from support.processes import wait_for
from support.run_folders import Look, end, make_running, note, shown, start, status, strip
from support.training import ENDLESS, Place, launch, records, stopped_at

from cluster.jobs import JOBS
from cluster.runs import find_runs
from data_prep.common.codes import ENDED
from data_prep.common.locks import LOCK
from pretraining.checkpoint.record import RECIPE, list_finished
from pretraining.reporting.metrics_file import METRICS

pytest_plugins = ["support.run_fixtures"]


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
    saved = list_finished(run)[-1].name.removeprefix("step-").lstrip("0")
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
    (run / LOCK).unlink()
    for name in (ENDED, RECIPE, "skipped.json", JOBS):
        (run / name).write_bytes(b'{"torn')
    assert (status(run).last_line, status(run).state) == (whole.last_line, "starting"), "its recipe was just written"
    for name in (ENDED, RECIPE, "skipped.json", JOBS):
        (run / name).unlink()
    bare = status(run)
    assert (bare.step, bare.total_steps, bare.phases) == (8, 0, 0)
    assert any("step 8" in line for line in shown(bare, 80))


def test_a_process_that_is_gone_is_known_at_once(run: Path) -> None:
    """A run on this machine whose process was killed, and not one that lives, or that is elsewhere."""
    make_running(run)
    script = "import sys; from pathlib import Path; from data_prep.common.locks import locked\n"
    script += "with locked(Path(sys.argv[1]), '', ''): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(run / LOCK)]
    worker = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    assert status(run).state == "running"
    worker.kill()
    worker.communicate()
    assert status(run).state == "gone"
    assert f"process {worker.pid} on " in status(run).why
    note(run, start("5", ago=-60))
    assert status(run).state != "gone", "the lock is of an earlier start"
    note(run)
    (run / LOCK).write_text("process 1 on another")
    assert status(run).state == "running"


def test_by_the_clock_there_is_no_total(run: Path, look: Look) -> None:
    recipe = re.sub(r"^steps = \d+\n", "share = 0.5\n", (run / RECIPE).read_text(), flags=re.MULTILINE)
    (run / RECIPE).write_text("hours = 24.0\n" + recipe)
    make_running(run)
    text = look(run)
    assert "step 8 " in text
    assert " of 8" not in text
    assert "left" in text


def test_runs_are_found_the_newest_last_and_fine_tuning_after_them(straight: Path, tmp_path: Path, look: Look) -> None:
    runs = tmp_path / "runs"
    (runs / "0").mkdir(parents=True)
    (runs / "0").chmod(0)
    for number, name in enumerate(("b", "jobs/a", "c")):
        shutil.copytree(straight, runs / name)
        os.utime(runs / name / METRICS, (1000 + number, 1000 + number))
    for task in (runs / "b" / "glue" / "sst2" / "lr1", runs / "tuned" / "sst2" / "lr1", runs / "tuned"):
        task.mkdir(parents=True, exist_ok=True)
        (task / METRICS).write_text('{"kind": "step", "step": 1, "epoch": 0.5, "loss": 0.7}\n')
    note(runs / "script", start("7"))
    (runs / "script2" / "sst2" / "lr1").mkdir(parents=True)
    (runs / "script2" / "sst2" / "lr1" / "begun.json").touch()
    note(runs / "script2", start("8"))
    assert find_runs(runs) == [runs / "b", runs / "jobs/a", runs / "c", runs / "script"]
    text = look(runs / "c", runs)
    assert re.findall(rf"^{runs}/(\S+)", text, re.MULTILINE) == ["c", "b", "jobs/a", "script", "script2"], "each once"


def test_what_ended_before_the_last_start_is_out_of_date(run: Path) -> None:
    note(run, start("5", ago=9e9), end("5", 0), start("6", 1, ago=-5))
    assert status(run, later=10).state == "starting"
    assert status(run).ended is None
