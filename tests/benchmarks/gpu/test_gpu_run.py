"""The parts of `make gpu` run one by one, and what each has measured is kept whatever the next one does."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tyro
from conftest import ROOT
from support.commands import assert_refusal, wait_for
from support.marks import slow

from benchmarks import processes
from benchmarks.gpu import run
from benchmarks.gpu.parts import GpuPart
from benchmarks.gpu.wheels import hide_packages, list_hidden_modules
from benchmarks.measure import read_results
from data_prep.common.terminal import open_console

GOOD = """
import json, sys
from pathlib import Path
Path(sys.argv[-1]).write_text(json.dumps({"figure": 7}))
with open(__file__ + ".runs", "a") as file:
    file.write("x")
"""
BAD = "print('no luck'); raise SystemExit(1)"
HANGS = f"print('half way', flush=True)\n{GOOD}import time; time.sleep(300)"
PARTS: dict[str, dict[str, Any]] = {"long": {"minutes": 30.0}, "peer": {"needs": ("transformers",)}}
"""What is special about parts, by their names."""


class Machine:
    """A machine on which parts are run that are given as scripts by their names."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self.patch, self.folder = place, patch, place / "results"
        patch.setattr(run, "BENCHMARKS", place)
        patch.setattr(run, "OUT", self.folder)
        patch.setattr(run, "DRY", place / "dry")
        patch.setattr(processes, "PATIENCE", 1.0)

    def run(self, scripts: dict[str, str], *more: str) -> int:
        """Runs parts, with more words of the command; returns its code."""
        for name, script in scripts.items():
            (self.place / f"{name}.py").write_text(script)
        usual = {name: {"name": name, "what": f"what {name} is", "command": [f"{name}.py"]} for name in scripts}
        parts = [GpuPart.model_validate({"minutes": 0.1, **usual[name], **PARTS.get(name, {})}) for name in scripts]
        self.patch.setattr(run, "load_parts", lambda: parts)
        settings = tyro.cli(run.GpuRun, args=more, config=(tyro.conf.FlagCreatePairsOff,))
        return run.measure(settings, open_console(soft_wrap=True))

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text())["parts"]
        return found

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

    def count_runs(self, name: str) -> int:
        return len((self.place / f"{name}.py.runs").read_text())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_group: None) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(machine: Machine) -> None:
    """And each is kept before the next begins, one that hangs with what it had at its limit."""

    class Impatient(processes.Child):
        """The limit of what hangs is the moment when it has done all that it does."""

        def wait(self, seconds: float) -> int | None:
            if "three.py" not in str(self.process.args):
                return super().wait(seconds)
            wait_for((machine.place / "three.py.runs").exists, seconds)
            return super().wait(0.0)

    machine.patch.setattr(run, "Child", Impatient)
    kept = str(machine.folder / "results.json")
    looks = f"import json; assert json.load(open({kept!r}))['parts']['one']['ended'] == 'done'"
    assert machine.run({"one": HANGS.replace("300", "0"), "two": BAD, "three": HANGS, "four": looks}) == 1
    found = machine.results
    ends = {"one": "done", "two": "failed", "three": "ran out of time", "four": "done"}
    assert {name: each["ended"] for name, each in found.items()} == ends
    assert found["one"]["measured"] == found["three"]["measured"] == {"figure": 7}
    log = machine.log
    assert log.count("half way") == 2
    assert "no luck" in log
    assert "two failed; once more: make gpu PARTS=two" in log
    assert machine.run({"setup": BAD, "five": GOOD}) == 1
    assert "five" not in machine.results, "nothing is measured where the setup fails"


STARTED_THERE = """
benchmarks.gpu.run benchmarks.gpu.basics benchmarks.sides benchmarks.gpu.trainer benchmarks.throughput
benchmarks.scaling benchmarks.fine_tuning benchmarks.inference pretraining.train pretraining.export
finetuning.run_glue finetuning.predict data_prep.readers
""".split()


def run_bare(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python as on a machine without a network, to which shards and few wheels were brought."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, env=hide_packages(), capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_commands_start_where_no_optional_package_is() -> None:
    done = run_bare("import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)", *STARTED_THERE)
    assert done.returncode == 0, done.stderr[-500:]


def test_what_such_a_machine_lacks_is_not_found() -> None:
    assert {"numba", "zstandard", "seqeval", "scipy", "matplotlib"} <= {*list_hidden_modules()}
    find = "from importlib.util import find_spec; assert find_spec('safetensors') and not find_spec('numba')"
    assert "ModuleNotFoundError: No module named 'numba'" in run_bare(f"{find}\nimport numba").stderr


def test_parts_that_are_done_are_not_run_again_unless_asked(machine: Machine) -> None:
    machine.run({"one": GOOD, "two": BAD})
    assert machine.run({"one": GOOD, "two": GOOD}) == 0
    assert machine.count_runs("one") == machine.count_runs("two") == 1
    assert machine.results["two"]["ended"] == "done"
    assert machine.run({"one": GOOD, "two": GOOD}, "--again", "--parts", "one") == 0
    assert (machine.count_runs("one"), machine.count_runs("two")) == (2, 1)


def test_the_setup_is_looked_at_on_each_machine_and_for_each_commit(machine: Machine) -> None:
    boot = machine.place / "boot_id"
    machine.patch.setattr(run, "BOOT", boot)
    for count, (started, commit) in enumerate([("one", "abc"), ("two", "abc"), ("two", "def")], 1):
        boot.write_text(started)
        machine.patch.setattr(run, "find_commit", lambda commit=commit: commit)
        for _ in range(2 if count == 1 else 1):
            assert machine.run({"setup": GOOD, "one": GOOD}) == 0
            assert machine.count_runs("setup") == count


def finds(**found: str) -> str:
    """A setup that finds this."""
    return f"import json, sys; from pathlib import Path; Path(sys.argv[-1]).write_text(json.dumps({found!r}))"


@pytest.mark.parametrize("other", [{"gpu": "T4"}, slow({"torch": "2.11"}), slow({"commit": "def"})])
def test_what_was_measured_on_another_machine_is_set_aside(machine: Machine, other: dict[str, str]) -> None:
    here = {"gpu": "H200", "torch": "2.13", "commit": "abc"}
    machine.run({"setup": finds(**here, date="Monday"), "one": GOOD, "two": GOOD})
    machine.run({"setup": finds(**here, date="Tuesday"), "one": GOOD, "two": GOOD}, "--parts", "setup", "--again")
    assert machine.count_runs("one") == 1
    machine.run({"setup": BAD, "one": GOOD, "two": GOOD}, "--again")  # which says nothing of the machine
    machine.run({"setup": finds(**{**here, **other}), "one": GOOD, "two": GOOD}, "--parts", "one", "--again")
    assert machine.count_runs("one") == 2
    assert set(machine.results) == {"setup", "one"}
    [aside] = json.loads((machine.folder / "results.json").read_text())["earlier"]
    assert (aside["subject"], aside["parts"]["two"]["measured"]) == (here, {"figure": 7})
    assert "all is measured anew" in machine.log


def test_no_part_is_started_that_cannot_end_in_time(machine: Machine) -> None:
    """And a part ends with it at the latest."""
    parts, begun = {"setup": GOOD, "one": GOOD, "long": GOOD, "two": GOOD}, time.time()
    assert machine.run(parts, "--until", str(begun + 9 * 60)) == 75
    assert set(machine.results) == {"setup", "one", "two"}
    log = machine.log
    assert "== long: left for the next time: it takes 30 minutes, about" in log
    assert "left for the next time: long; the same command goes on with them" in log
    assert machine.run(parts, "--until", str(begun + 40 * 60)) == 0
    assert machine.results["long"]["ended"] == "done"
    limits: list[float] = []

    def run_nothing(command: Sequence[str], limit: float, *_: object) -> str:
        limits.append(limit)
        return "ran out of time" if "one.py" in command[1] else "done"

    machine.patch.setattr(run, "run_limited", run_nothing)
    assert machine.run(parts, "--until", str(time.time() + 60), "--again") == 1
    assert len(limits) == 3
    assert 20 < min(limits) <= max(limits) < 45


def test_parts_are_chosen_by_how_their_names_begin_and_a_missing_package_costs_only_what_needs_it(
    machine: Machine,
) -> None:
    lacks = finds(gpu="H200", missing={"transformers": "ImportError: none"})  # type: ignore[arg-type]
    names = ("data", "peer", "peer-large", "peer-base", "peers", "one")
    parts = {"setup": lacks, **dict.fromkeys(names, GOOD)}
    assert machine.run(parts, "--parts", "peer", "one") == 0
    assert set(machine.results) == {"setup", "data", "peer-large", "peer-base", "one"}
    assert "== peer: left out, for want of transformers" in machine.log
    told = "pee: no part of this name; there is setup, data, peer, peer-large"
    assert_refusal(told, machine.run, parts, "--parts", "peer", "pee")


def test_copies_lie_flat_and_none_is_too_large(machine: Machine) -> None:
    copies, profile = machine.place / "copies", machine.folder / "profile/large-128-256/profile"
    profile.mkdir(parents=True)
    (profile / "table.txt").write_text("kernels")
    (profile / "trace.json.gz").write_bytes(b"trace" * 10_000)
    machine.patch.setattr(run, "MOST_BYTES", 40_000)
    machine.patch.setenv("OUT", str(copies))
    assert machine.run({"two": GOOD}) == 0
    assert {path.name for path in copies.rglob("*")} == {"results.json", "log.txt", "table.txt"}
    assert (copies / "results.json").read_bytes() == (machine.folder / "results.json").read_bytes()
    assert "== two: done" in (copies / "log.txt").read_text()


def test_results_of_a_gpu_alone_are_kept_and_share_no_folder_with_a_dry_run(machine: Machine) -> None:
    (machine.place / "kept").mkdir()
    machine.patch.setattr(run, "RESULTS", machine.place / "kept")
    assert_refusal("no results of a GPU", machine.run, {"one": GOOD}, "keep")
    found = finds(gpu="H200", hardware="h200", missing={"numba": "none"}, instruction_sets=["avx2"])  # type: ignore[arg-type]
    machine.run({"setup": found, "one": GOOD})
    assert machine.run({"one": GOOD}, "keep") == 0
    [path] = (machine.place / "kept").glob("gpu-*.json")
    assert read_results(path)["parts"]["one"]["measured"] == {"figure": 7}
    assert read_results(path)["environment"] == {"gpu": "H200", "hardware": "h200", "instruction_sets": ["avx2"]}
    assert (machine.run({"two": GOOD}, "--dry"), {*machine.results}) == (0, {"setup", "one"})
