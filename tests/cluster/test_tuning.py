"""How fine-tuning stands, as its folders tell."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from support.run_folders import Look, strip

from data_prep.common.codes import ENDED
from data_prep.common.files import write_json
from data_prep.common.locks import LOCK
from finetuning.results import BEGUN, PLAN, RESULTS
from pretraining.reporting.metrics_file import METRICS

pytest_plugins = ["support.run_fixtures"]


def write_tuning(out: Path) -> None:
    """Three of five runs are done, one of them failed; one is at work, and one not begun."""
    write_json(out / PLAN, {"rte": ["seed1", "seed2", "seed3"], "cola": ["seed1", "seed2"]})
    for task, run in (("rte", "seed1"), ("rte", "seed2"), ("rte", "seed3"), ("cola", "seed1")):
        write_json(out / task / run / BEGUN, {"settings": {"epochs": 3.0}})
    write_json(out / "rte" / "seed1" / RESULTS, {"metric": "accuracy", "score": 0.66})
    write_json(out / "rte" / "seed2" / RESULTS, {"metric": "accuracy", "score": 0.7})
    write_json(out / "cola" / "seed1" / RESULTS, {"metric": "matthews", "score": None, "failed": "not a number"})
    line = {"kind": "step", "step": 120, "epoch": 1.5, "loss": 0.3, "seconds_left": 60.0}
    (out / "rte" / "seed3" / METRICS).write_text(json.dumps(line) + "\n")


def test_fine_tuning_says_how_far_it_is_and_what_it_has_scored(tmp_path: Path, look: Look) -> None:
    out = tmp_path / "runs" / "mini" / "glue"
    write_tuning(out)
    text = strip(look(tmp_path / "runs"))
    assert f"{out}  running\n" in text
    for told in ("3 of 5 runs done", "2 of 3 runs, best accuracy 70.0\n", "1 of 2 runs, 1 failed\n"):
        assert told in text
    assert "seed3: step 120, epoch 1.50 of 3, 1 m 00 s left\n" in text
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


def test_fine_tuning_that_falls_silent(tmp_path: Path, look: Look) -> None:
    write_json(tmp_path / PLAN, {"rte": ["seed1"], "a" * 300: ["seed1"]})
    assert "running" in look(tmp_path), "nothing has begun, and the plan is new"
    write_tuning(tmp_path)
    for path in tmp_path.rglob("*.json*"):
        os.utime(path, (time.time() - 3600,) * 2)
    assert "silent  no line for 1 h" in look(tmp_path)
