"""Whatever stands in the files of a run, and whatever it is called, status.py shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.marks import slow
from support.run_folders import end, note, shown, start, status
from support.training import records

from cluster.jobs import JOBS
from cluster.runs import find_runs
from data_prep.common.codes import ENDED
from data_prep.common.files import read_json
from data_prep.common.toml_text import read_toml, toml_text
from pretraining.checkpoint.record import RECIPE
from pretraining.reporting.metrics_file import METRICS
from pretraining.training.skips import SKIPPED, Skip, write_skips

pytest_plugins = ["support.run_fixtures"]

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


@pytest.mark.parametrize("every", [7, slow(1)])
def test_no_damage_to_any_file_ends_it(run: Path, every: int) -> None:
    """Of more than five hundred, or of every seventh."""
    write_skips(run, [Skip(1, 0, 2, "it leapt")])
    note(run, start("5", 0), end("5", 75), start("5", 1), end("5", 0))
    whole = {name: (run / name).read_bytes() for name in (ENDED, RECIPE, SKIPPED, JOBS, METRICS)}
    damaged = [(name, json.dumps(other)) for name in (ENDED, SKIPPED) for other in changed(read_json(run / name))]
    lines = [
        (METRICS, records(run)[-1]),
        (METRICS, records(run, "evaluation")[-1]),
        (JOBS, start("5")),
        (JOBS, end("5", 0)),
    ]
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
    for name, text in content[::every]:
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(ROOT / "cluster" / "status.py"), str(named)]
    told = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert rb"caf\udce9  done" in told
    [read] = json.loads(subprocess.run([*command, "--json"], env=environment, capture_output=True, check=True).stdout)
    assert Path(read["run"]) == named
