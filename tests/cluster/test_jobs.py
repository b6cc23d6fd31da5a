"""What job scripts note, and what a pretended queue says."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import Look, Squeue, end, make_running, note, shown, start, status, strip

from cluster import jobs
from cluster.runs import RunStatus
from cluster.status import Observer, main

pytest_plugins = ["support.run_fixtures"]


def test_one_question_to_the_queue_for_all_runs(straight: Path, tmp_path: Path, look: Look, squeue: Squeue) -> None:
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


def test_a_second_job_that_was_refused_does_not_make_the_first_one_fail(run: Path) -> None:
    make_running(run)
    begun = [start("5", ago=900), start("6", ago=600)]
    note(run, *begun, {**end("6", 2), "time": int(time.time()) - 590})
    there = jobs.Queue({"5": jobs.QueuedJob("5", "RUNNING", "None", "node1")})
    for queue in (there, None):  # known by the queue, or by lines that were written since
        now = status(run, queue=queue)
        assert (now.state, now.notes and now.notes.job) == ("running", "5")
    note(run, *begun, {**end("6", 2), "time": int(time.time()) + 9})
    assert status(run, queue=jobs.Queue({})).state == "failed"
    assert status(run).state == "running", "without a queue: its next line is not due yet"
    assert status(run, later=9e5).state != "running"
    note(run, *begun, end("6", 2), end("5", 0))
    assert status(run).state == "done"


def test_a_job_that_waits_for_nodes_it_must_not_have_says_how_to_undo_it(run: Path, look: Look, squeue: Squeue) -> None:
    note(run, start("5"))
    squeue("echo '5|PENDING|Resources||node[1-2]'")
    assert "without node[1-2]; scontrol update JobId=5 ExcNodeList= " in " ".join(look(run).split())
    squeue("echo '5|PENDING|Resources||(null)'")
    assert "ExcNodeList" not in look(run)


def test_a_job_that_was_killed_has_failed(run: Path) -> None:
    make_running(run)
    note(run, start("5"), end("5", 137))
    now = status(run)
    assert now.state == "failed"
    assert now.why == "job 5 has ended with 137 (killed by SIGKILL); its output says why"


def test_a_job_that_has_just_begun_has_no_more_than_its_notes(tmp_path: Path, look: Look, squeue: Squeue) -> None:
    note(tmp_path / "run", start("5"))
    squeue("echo '5|RUNNING|None|node1'")
    text = strip(look(tmp_path / "run"))
    assert re.search(r"run  starting  since 1 m 0\d s\n  progress    step 0\n  job         5 RUNNING on node1\n", text)


def test_a_job_that_the_queue_no_longer_knows(run: Path, look: Look, squeue: Squeue) -> None:
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
    does: str, told: str, run: Path, squeue: Squeue, capsys: Any, monkeypatch: pytest.MonkeyPatch
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


def test_who_watches_asks_the_queue_only_now_and_then(run: Path, squeue: Squeue) -> None:
    note(run, start("5"))
    calls = squeue("echo '5|RUNNING|None|node1'")
    observer = Observer((run,))
    found = [status for _ in range(3) for status in observer.look() if isinstance(status, RunStatus)]
    assert [status.job for status in found] == [jobs.QueuedJob("5", "RUNNING", "None", "node1")] * 3
    assert len(calls.read_text().splitlines()) == 1
    note(run, start("6"))
    observer.look()
    assert "--jobs=6" in calls.read_text().splitlines()[1], "another job is asked about at once"
