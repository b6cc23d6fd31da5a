"""Where a run stands, as its folder alone tells: real runs of seconds, fine-tuning, and whatever damage there is."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.commands import wait_for
from support.run_folders import end, look, make_running, note, shown, start, status
from support.training import ENDLESS, Place, launch, records, stopped_at

from cluster.runs import JOBS, find_runs
from data_prep.common.codes import ENDED
from data_prep.common.files import read_json, write_json
from data_prep.common.locks import LOCK
from data_prep.common.toml_text import read_toml, toml_text
from finetuning.results import BEGUN, PLAN, RESULTS
from pretraining.checkpoint.record import RECIPE, list_finished
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.skips import SKIPPED, Skip, write_skips


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A finished run, to be changed."""
    return shutil.copytree(straight, tmp_path / "runs" / "one")


def test_a_run_that_trains_then_falls_silent_or_is_stopped(place: Place) -> None:
    run = place.folder / "run"
    training = launch(place.command("run", *ENDLESS), ranks=1)
    wait_for((run / METRICS).exists)
    assert status(run).state in ("starting", "running")
    training.reach(3)
    now = status(run)
    assert (now.state, now.phase, now.phase_name, now.total_steps) == ("running", 1, "short", 5003)
    assert now.step >= 3
    assert re.search(r"of 5003 .* left", re.sub(",", "", look(run)))
    assert (status(run, later=100).state, status(run, later=200).state) == ("running", "silent")
    training.signal(signal.SIGTERM)
    training.wait()
    text = look(run)
    assert re.search(r"run  stopped  .* ago\n", text)
    assert "ended with  75 (saved and stopped): stopped by a signal after step" in text
    saved = list_finished(run)[-1].name.removeprefix("step-").lstrip("0")
    assert f"of step {saved}\n" in text


def test_a_run_is_silent_only_where_its_own_lines_come_faster(run: Path) -> None:
    make_running(run)
    assert status(run, later=500).state == "silent"
    slow = [json.dumps({**line, "seconds_per_step": 300.0}) + "\n" for line in records(run)]
    (run / METRICS).write_text("".join(slow))
    assert (status(run, later=500).state, status(run, later=1000).state) == ("running", "silent")
    assert "no line for 16 m" in status(run, later=1000).why


def test_a_run_without_a_step_is_starting(straight: Path, tmp_path: Path) -> None:
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
    assert torn.last_line == whole.last_line
    (run / LOCK).unlink()
    for name in (ENDED, RECIPE, SKIPPED, JOBS):
        (run / name).write_bytes(b'{"torn')
    assert (status(run).last_line, status(run).state) == (whole.last_line, "starting"), "its recipe was just written"
    for name in (ENDED, RECIPE, SKIPPED, JOBS):
        (run / name).unlink()
    assert (status(run).step, status(run).total_steps, status(run).phases) == (8, 0, 0)


def test_a_process_that_is_gone_is_known_at_once(run: Path) -> None:
    """A run on this machine whose process was killed, and not one that lives, or that is elsewhere."""
    make_running(run)
    worker = subprocess.Popen(["sleep", "60"])
    (run / LOCK).write_text(f"process {worker.pid} on {os.uname().nodename}")
    assert status(run).state == "running"
    worker.kill()
    worker.wait()
    assert status(run).state == "gone"
    assert f"process {worker.pid} on " in status(run).why
    note(run, start("5", ago=-60))
    assert status(run).state != "gone", "the lock is of an earlier start"
    note(run)
    (run / LOCK).write_text("process 1 on another")
    assert status(run).state == "running"


def test_by_the_clock_there_is_no_total(run: Path) -> None:
    recipe = re.sub(r"^steps = \d+\n", "share = 0.5\n", (run / RECIPE).read_text(), flags=re.MULTILINE)
    (run / RECIPE).write_text("hours = 24.0\n" + recipe)
    make_running(run)
    text = look(run)
    assert "step 8 " in text
    assert " of 8" not in text
    assert "left" in text


def test_runs_are_found_the_newest_last_and_fine_tuning_after_them(straight: Path, tmp_path: Path) -> None:
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


def test_an_end_before_the_last_start_or_the_last_line_is_out_of_date(run: Path) -> None:
    note(run, start("5", ago=9e9), end("5", 0), start("6", 1, ago=-5))
    assert (status(run, later=10).state, status(run).ended) == ("starting", None)
    note(run)
    make_running(run)
    for ago, state in ((60, "running"), (1, "failed")):
        when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - ago))
        write_json(run / ENDED, {"code": 76, "reason": "rank 0 has ended", "rank": 1, "time": when})
        assert status(run).state == state


# Fine-tuning


def write_tuning(out: Path) -> None:
    """Three of five runs are done, one of them failed; one is at work, and one not begun."""
    write_json(out / PLAN, {"rte": ["seed1", "seed2", "seed3"], "cola": ["seed1", "seed2"]})
    for task, name in (("rte", "seed1"), ("rte", "seed2"), ("rte", "seed3"), ("cola", "seed1")):
        write_json(out / task / name / BEGUN, {"settings": {"epochs": 3.0}})
    write_json(out / "rte" / "seed1" / RESULTS, {"metric": "accuracy", "score": 0.66})
    write_json(out / "rte" / "seed2" / RESULTS, {"metric": "accuracy", "score": 0.7})
    write_json(out / "cola" / "seed1" / RESULTS, {"metric": "matthews", "score": None, "failed": "not a number"})
    line = {"kind": "step", "step": 120, "epoch": 1.5, "loss": 0.3, "seconds_left": 60.0}
    (out / "rte" / "seed3" / METRICS).write_text(json.dumps(line) + "\n")


def test_fine_tuning_says_how_far_it_is_and_what_it_has_scored(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "mini" / "glue"
    write_tuning(out)
    text = look(tmp_path / "runs")
    assert f"{out}  running\n" in text
    for told in ("3 of 5 runs done", "2 of 3 runs, best accuracy 70.0\n", "1 of 2 runs, 1 failed\n"):
        assert told in text
    assert "seed3: step 120, epoch 1.50, 1 m 00 s left\n" in text
    (out / LOCK).write_text(f"process 4194305 on {os.uname().nodename}")
    assert f"{out}  gone  process 4194305 on " in look(out)
    end = {"code": 2, "reason": "no room", "rank": 0, "time": "2099-01-01T00:00:00+00:00"}
    write_json(out / ENDED, end)
    assert "no room" in " ".join(look(out).split())  # the path may be long enough to break the line
    [read] = json.loads(look(out, "--json"))
    assert (read["state"], read["tasks"][1]["done"]) == ("failed", 2)
    for path in (PLAN, ENDED, f"rte/seed1/{RESULTS}", f"rte/seed3/{METRICS}", f"rte/seed3/{BEGUN}"):
        for content in ("", "[1]", '{"settings": 3, "rte": 4, "score": "x", "step": []}\n', "null"):
            (out / path).write_text(content)
            assert "runs done" in look(out)


def test_fine_tuning_that_falls_silent(tmp_path: Path) -> None:
    write_json(tmp_path / PLAN, {"rte": ["seed1"], "a" * 300: ["seed1"]})
    assert "running" in look(tmp_path), "nothing has begun, and the plan is new"
    write_tuning(tmp_path)
    for path in tmp_path.rglob("*.json*"):
        os.utime(path, (time.time() - 3600,) * 2)
    assert "silent  no line for 1 h" in look(tmp_path)


# Whatever stands in the files of a run, and whatever it is called


WRONG: list[Any] = [None, "text", "\udce9", [1], {"a": 1}, True, -1, 0, 10**30, float("nan"), -1e300]


def changed(content: Any) -> Iterator[Any]:
    """Contents in which one value, or all, is what it cannot be."""
    yield from WRONG
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        for inner in changed(content[key]):
            other = content.copy()
            other[key] = inner
            yield other


def test_no_damage_to_any_file_ends_it(run: Path) -> None:
    """Of every thirteenth of more than five hundred."""
    write_skips(run, [Skip(1, 0, 2, "it leapt")])
    note(run, start("5", 0), end("5", 75), start("5", 1), end("5", 0))
    whole = {name: (run / name).read_bytes() for name in (ENDED, RECIPE, SKIPPED, JOBS, METRICS)}
    damaged = [(name, json.dumps(other)) for name in (ENDED, SKIPPED) for other in changed(read_json(run / name))]
    lines = [(METRICS, records(run)[-1]), (METRICS, records(run, "evaluation")[-1])]
    lines += [(JOBS, start("5")), (JOBS, end("5", 0))]
    for name, line in lines:
        for other in changed(line):
            damaged += [(name, whole[name].decode() + json.dumps(other) + "\n"), (name, json.dumps(other) + "\n")]
    recipe = read_toml(whole[RECIPE].decode())
    for part in ("phases", "guards", "logging", "hours", "steps"):
        for other in changed(recipe.get(part, 1)):
            with suppress(TypeError, ValueError, AttributeError):  # which TOML cannot say
                damaged.append((RECIPE, toml_text({**recipe, part: other})))
    content = [(name, text.encode(errors="replace")) for name, text in damaged]
    for name, text in whole.items():
        content += [(name, other) for other in (b"", text[:-9], b"\xff\0" * 40, b"[" * 100_000, b"\xe9\n" + text)]
    assert len(content) > 500
    for name, text in content[::13]:
        (run / name).write_bytes(text)
        "\n".join(shown(status(run), 80)).encode(errors="replace")
        (run / name).write_bytes(whole[name])
    for name in whole:
        (run / name).unlink()
        (run / name).mkdir()
    for found in find_runs(run):
        shown(status(found), 80)


def test_a_name_that_is_no_text_is_shown(run: Path) -> None:
    """In a terminal that has ASCII alone, and in JSON that a script can open it by."""
    named = run.with_name(os.fsdecode(b"caf\xe9"))
    run.rename(named)
    assert Path(json.loads(look(named, "--json"))[0]["run"]) == named
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    command = [sys.executable, str(ROOT / "cluster" / "status.py"), str(named)]
    told = subprocess.run(command, env=environment, capture_output=True)
    assert (told.returncode, told.stderr) == (0, b"")
    assert rb"caf\udce9  done" in told.stdout
    assert b"\x1b" not in told.stdout
