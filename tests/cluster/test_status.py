"""status.py as a user starts it: on one run, on many, for scripts, in a pipe and in a terminal; with what job scripts
note and what a pretended queue says."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from conftest import ROOT
from rich.console import Console
from support.commands import run_main
from support.run_folders import end, look, make_running, note, put_squeue, shown, start, status
from support.training import records

from cluster import runs
from cluster.runs import Queue, QueuedJob
from cluster.status import main
from data_prep.common.codes import ENDED
from data_prep.common.files import write_json
from pretraining.architectures.declaration import make_shape
from pretraining.config.overrides import load_recipe
from pretraining.processes.context import Context
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.finishing import finish_run
from pretraining.training.request import Request
from pretraining.training.skips import Skip, write_skips


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A finished run, to be changed."""
    return shutil.copytree(straight, tmp_path / "runs" / "one")


def test_a_finished_run(straight: Path) -> None:
    text = look(straight)
    scored = records(straight, "evaluation")[-1]
    losses = f"{records(straight)[-1]['loss']:.4f}   validation {scored['masked_loss'] + scored['next_loss']:.4f}"
    assert re.search(rf"^{straight}  done  .* ago$", text, re.MULTILINE)
    for told in ("step 8 of 8", "2 of 2: long, length 64", f"loss        {losses} at step 8\n"):
        assert told in text
    assert re.search(r"pieces/s   use \d+%   wait \d+%\n", text)
    assert re.search(r"last line .* ago   checkpoint .* ago, of step 8\n", text)
    for absent in ("left", "job", "restarts", "went back", "ended with", "\x1b"):
        assert absent not in text


def test_without_a_name_those_below_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    assert look().startswith("runs/one  done")


def test_a_folder_without_runs_and_options_that_make_no_sense_are_refused(run: Path) -> None:
    none = run.with_name("none")
    for _ in range(2):
        said = run_main(main, none, code=2)
        assert said.startswith(f"error: {none}: no ")
        assert "name the folder that train.py had as --out" in said
        none.mkdir(exist_ok=True)
    assert run_main(main, none, "--charts", code=2).startswith(f"error: {none}: no run of pre-training")


def test_losses_are_drawn_at_the_end_and_when_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_main(main, run, "--charts")
    drawn = (run / "loss.png").read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    (run / "loss.png").unlink()
    context = cast(Context, SimpleNamespace(console=Console()))
    recipe = load_recipe(run / "recipe.toml")
    request = cast(Request, SimpleNamespace(out=run, shape=make_shape("tiny", 100), recipe=recipe))
    finish_run(request, context, trained_now=False)
    assert not (run / "loss.png").exists(), "8 steps were a trial"
    monkeypatch.setattr("pretraining.training.finishing.TRIAL", 8)
    finish_run(request, context, trained_now=False)
    assert (run / "loss.png").read_bytes() == drawn
    (run / METRICS).write_text("")
    assert f"{run}/loss.png: not drawn: 0 logged steps" in run_main(main, run, "--charts")


def test_json_has_the_same_for_scripts(run: Path) -> None:
    note(run, start("5", ago=9e9), end("5", 75), start("6", 1, ago=9e9))
    [read] = json.loads(look(run, "--json"))
    assert (read["run"], read["state"], read["step"], read["total_steps"]) == (str(run), "done", 8, 8)
    assert (read["last_line"], read["last_evaluation"]) == (records(run)[-1], records(run, "evaluation")[-1])
    assert (read["ended"]["code"], read["checkpoint"]) == (0, 8)
    assert (read["notes"]["restarts"], read["notes"]["code_before"], read["notes"]["job"]) == (1, 75, "6")


def test_it_loads_nothing_heavy() -> None:
    heavy = {"torch", "deepspeed", "transformers", "numba", "numpy", "pyarrow"}
    code = f"import sys, cluster.status; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


# What job scripts note, and what the queue says


def test_one_question_to_the_queue_for_all_runs(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    for name, job in (("a", "11"), ("b", "12_3"), ("c", "13")):
        make_running(shutil.copytree(straight, runs / name))
        note(runs / name, start(job))
    calls = put_squeue(tmp_path, monkeypatch, "echo '11|RUNNING|None|node[1-2]'; echo '12_3|PENDING|Resources|'")
    text = look(runs)
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
    note(run, start("5"), end("5", 137))
    now = status(run)
    assert (now.state, now.why) == ("failed", "job 5 has ended with 137 (killed by SIGKILL); its output says why")


def test_the_end_of_a_second_job_does_not_make_the_first_one_fail(run: Path) -> None:
    """Which began at the same moment, so that the script did not refuse it; the first one has written lines since."""
    make_running(run)
    begun = [start("5", ago=900), start("6", ago=600)]
    note(run, *begun, {**end("6", 2), "time": int(time.time()) - 590})
    for queue in (Queue({"5": QueuedJob("5", "RUNNING", "None", "node1")}), None):
        assert status(run, queue=queue).state == "running"
    note(run, *begun, {**end("6", 2), "time": int(time.time()) + 9})
    assert status(run).state == "failed", "nothing was written since"
    note(run, *begun, end("6", 2), end("5", 0))
    assert status(run).state == "done"


def test_a_job_that_has_just_begun_has_no_more_than_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path / "run", start("5"))
    put_squeue(tmp_path, monkeypatch, "echo '5|RUNNING|None|node1'")
    panel = r"run  starting  since \d+ m \d+ s\n  progress    step 0\n  job         5 RUNNING on node1\n"
    assert re.search(panel, look(tmp_path / "run"))


def test_a_job_that_the_queue_no_longer_knows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(run, start("5", ago=9e9), end("5", 0))
    put_squeue(run, monkeypatch, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert ("done" in look(run), "warning" in look(run)) == (True, False)


SILENT = {
    "exec sleep 60": "warning: squeue did not answer: ",
    "echo 'squeue: error: no controller' >&2; exit 1": "warning: squeue: error: no controller;",
    "exit 3": "warning: squeue: exit code 3;",
}


@pytest.mark.parametrize("does", SILENT)
def test_a_queue_that_does_not_answer_hides_nothing_else(
    does: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ANSWER_SECONDS", 0.1 if "sleep" in does else 30.0)
    make_running(run)
    note(run, start("5"))
    put_squeue(run, monkeypatch, does)
    for words in ([], ["--json"]):
        assert main([str(run), *words]) == 0
        printed = capsys.readouterr()
        assert SILENT[does] in printed[bool(words)]
        assert "running" in printed.out
        assert "silent" not in printed.out, "nobody said that the job is gone"


# Panels


def test_a_run_says_why_it_failed_and_went_back(run: Path) -> None:
    write_skips(run, [Skip(1, 0, 2, "the loss leapt to 9.02 in the steps to 7")])
    reason = "checkpoints: cannot be written: No space left on device\nmake room, or keep fewer checkpoints"
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    write_json(run / ENDED, {"code": 2, "reason": reason, "rank": 1, "time": now})
    text = look(run)
    assert re.search(r"one  failed  \d.* s ago\n", text)
    assert "went back   1 × to a checkpoint, the last since the loss leapt to 9.02 in the steps to 7" in text
    for line in ("2 (something must be mended first): checkpoints: cannot be written", "make room, or keep fewer"):
        assert line in text


@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_into_the_terminal(width: int, run: Path) -> None:
    note(run, start("123_4"), end("123_4", 75), start("123_4", 1))
    write_json(run / ENDED, {"code": 76, "reason": "word " * 60, "rank": 1, "time": "2099-01-01T00:00:00+00:00"})
    write_skips(run, [Skip(1, 0, 2, "the loss leapt " * 10)])
    queue = Queue({"123_4": QueuedJob("123_4", "COMPLETING", "None", "node[001-128]")})
    lines = shown(status(run, queue=queue), width)
    assert max(map(len, lines)) <= width
    assert len(lines) > 9
