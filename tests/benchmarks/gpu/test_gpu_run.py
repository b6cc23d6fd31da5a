"""The parts of `make gpu` share a process, and what each has measured is kept whatever the next one does."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import tyro
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.commands import assert_refusal
from support.marks import slow

from benchmarks import measure
from benchmarks.gpu import run, worker
from benchmarks.gpu.probes import summarise_speed
from benchmarks.gpu.run import GpuRun
from benchmarks.gpu.worker import Part
from benchmarks.measure import read_results
from data_prep.common.errors import UserError
from data_prep.common.terminal import open_console

MAKEFILE = (ROOT / "Makefile").read_text()


class Machine:
    """A machine on which a worker runs some parts, which note their names."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.ran = place / "results", patch, list[str]()
        patch.setattr(run, "OUT", self.folder)
        patch.setattr(worker, "describe_environment", lambda _: self.about)
        self.about: dict[str, str] = {"gpu": "H200", "hardware": "h200", "torch": "2.13", "commit": "abc"}
        self.folder.mkdir()

    def work(self, names: str, *, fails: str = "", **settings: Any) -> int:
        """Runs parts of these names, each of 60 seconds; returns the exit code."""

        def note(name: str) -> dict[str, int]:
            self.ran.append(name)
            if name == fails:
                raise UserError("no luck")
            return {"figure": len(self.ran)}

        made = [
            Part(name, 60, name, lambda *_, name=name: note(name), ("nowhere",) * (name == "peer"))
            for name in names.split()
        ]
        self.patch.setattr(worker, "PARTS", made)
        return worker.measure(GpuRun(**settings), open_console(soft_wrap=True))

    @property
    def ends(self) -> dict[str, str]:
        return {name: part["ended"] for name, part in run.read_state(self.folder)["parts"].items()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_group: None) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_parts_are_chosen_and_those_left_that_do_not_end_in_time(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.work("one two-a two-b peer", parts=("two", "peer")) == 0
    assert machine.ran == ["two-a", "two-b"]
    assert "peer: left out, for want of nowhere" in capsys.readouterr().out
    assert machine.work("one two-a two-b", until=time.time() + 60) == 75
    assert machine.ran == ["two-a", "two-b"]
    assert "left for the next time: one;" in capsys.readouterr().out
    assert machine.work("one two-a two-b", until=time.time() + 90) == 0
    assert machine.ran == ["two-a", "two-b", "one"]
    told = "tw: no part of this name; there is one, two-a"
    assert_refusal(told, machine.work, "one two-a", parts=("one", "tw"))


def test_a_part_that_fails_takes_nothing_from_the_others_and_runs_again(machine: Machine) -> None:
    machine.work("one two three", fails="two")
    assert machine.ends == {"one": "done", "two": "failed: no luck", "three": "done"}
    begun = time.time()
    machine.work("one two three", since=begun)
    assert machine.ran == ["one", "two", "three", "two"]
    machine.work("one two three", since=begun, again=True)
    assert machine.ran[4:] == ["one", "three"], "two has begun since then"


def test_results_of_another_machine_are_set_aside_and_those_of_a_gpu_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.work("one two")
    machine.about |= {"commit": "def"}
    machine.work("one")
    assert machine.ends == {"one": "done"}
    assert {*json.loads((machine.folder / "results-before.json").read_text())["parts"]} == {"one", "two"}
    monkeypatch.setattr(run, "RESULTS", machine.folder)
    assert read_results(run.keep(machine.folder))["parts"]["one"]["measured"] == {"figure": 3}
    assert_refusal("no results of a GPU", run.keep, machine.folder / "none")


def test_without_a_gpu_nothing_is_measured(machine: Machine) -> None:
    del machine.about["gpu"]
    assert_refusal(r"torch \S+ finds no GPU: .*\n.*, or take make gpu DRY=1", machine.work, "one")


FAULTS = """
import os, sys, time
from pathlib import Path
from unittest.mock import MagicMock

sys.modules |= {"benchmarks.throughput": MagicMock(), "benchmarks.gpu.probes": MagicMock()}  # which take long to load
from benchmarks.gpu import run, worker
from benchmarks.gpu.worker import Part
from benchmarks.measure import run_command

run.DRY = Path(__file__).with_name("results")

def die(_, out, __):
    out.write_text('{"figure": 3}')
    os.abort()

def break_gpu(*_):
    worker.has_fault = lambda: True
    raise RuntimeError("an illegal address")

works = {"one": lambda *_: {"figure": 1}, "dies": die, "breaks": break_gpu}
works |= {"hangs": lambda *_: time.sleep(300), "last": lambda *_: {"figure": 2}}
worker.PARTS = [Part(name, -14 if name == "hangs" else 9, name, work) for name, work in works.items()]
run_command(worker.GpuRun, worker.measure, "gpu")
"""
"""A worker with a part that ends the process, one that leaves the GPU unusable, and one that hangs."""


ENDS = {
    "one": "done",
    "dies": "ended its process with -6",
    "breaks": "failed: an illegal address",
    "hangs": "ran out of time",
    "last": "done",
}


@pytest.mark.parametrize("names", [["one", "dies", "last"], slow([*ENDS])])
def test_another_process_goes_on_where_one_dies_or_hangs(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(FAULTS)
    (tmp_path / "results").mkdir()
    stale = {"parts": {}, "running": {"name": "killed", "begun": 0.0, "limit": 1.0}}
    (tmp_path / "results/results.json").write_text(json.dumps(stale))
    monkeypatch.setattr(run, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(run, "DRY", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["run.py", "--dry", "--parts", *names])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OUT", str(tmp_path / "copies"))
    assert run.measure(GpuRun(dry=True), open_console(soft_wrap=True)) == 1
    parts = json.loads((tmp_path / "copies/results.json").read_text())["parts"]
    assert {name: part["ended"] for name, part in parts.items()} == {name: ENDS[name] for name in names}
    assert [parts[name]["measured"] for name in ("dies", "last")] == [{"figure": 3}, {"figure": 2}]
    log = (tmp_path / "copies/log.txt").read_text()
    assert "dies: ended its process with -6; once more: make gpu PARTS=dies" in log


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu_without_any_package_that_may_be_missing(tmp_path: Path) -> None:
    """What is optional cannot be imported."""
    subprocess.run(["make", "DRY=1", "build/gpu-shards/manifest.json"], cwd=ROOT, check=True)
    hidden = ("transformers", "accelerate", "numba", "hypothesis", "scipy", "sklearn", "matplotlib", "tensorboard")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/run.py", "--dry"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    for name, package in (("tests", "hypothesis"), ("fine-tuning", "numba"), ("peer", "transformers")):
        assert f"== {name}: left out, for want of {package}" in done.stdout
    assert "not installed: transformers" in done.stdout, "answers have no peer"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "log.txt", "profile.tar.gz"}
    found = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    assert {*found} >= {part.name for part in worker.PARTS} - {"tests", "fine-tuning", "peer"}
    sides = found["small-large"]["measured"]["contests"]["tiny-128"]["sides"]
    assert {*sides} == {"cloze", "cloze, no graphs", "cloze, LAMB", "cloze, Muon"}
    assert found["large-128"]["measured"]["contests"]["tiny-128"]["kernels"][0]["microseconds"] > 0
    assert found["run"]["measured"]["continued"]["pieces_per_second"] > 0


def test_what_is_worth_most_fits_into_one_loan() -> None:
    """Of ten minutes, of which some are for the installation."""
    assert sum(part.seconds for part in worker.PARTS) < 600
    assert len({part.name for part in worker.PARTS}) == len(worker.PARTS)


def test_packages_of_the_wheels_need_no_others_than_those_of_torch() -> None:
    found = re.search(r"^GPU_PACKAGES \?= ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert found is not None
    gathered = {*found[1].replace("\\\n", " ").split()}

    def close(names: set[str]) -> set[str]:
        waiting, known = [*names], set[str]()
        while waiting:
            if (name := canonicalize_name(waiting.pop())) not in known:
                known.add(name)
                try:
                    needed = map(Requirement, requires(name) or [])
                except PackageNotFoundError:  # for another Python
                    continue
                target = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.0"}
                waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate(target)]
        return known

    assert close(gathered) <= gathered | close({"torch", "numpy", "pyarrow"})
    assert not gathered & {"torch", "numpy", "pyarrow"}


def test_nothing_is_installed_that_the_machine_has() -> None:
    found = re.search(r"^ABSENT := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert found is not None
    asked = [sys.executable, "-c", found[1].replace("\\\n", ""), "torch", "pydantic-core", "nowhere"]
    assert subprocess.check_output(asked, text=True).split() == ["nowhere"]


MEANT = {
    "make gpu": GpuRun(),
    "make gpu DRY=1": GpuRun(dry=True),
    "make gpu MINUTES=9": GpuRun(until=1e9),
    'make gpu PARTS="large small"': GpuRun(parts=("large", "small")),
    "make gpu PARTS=host AGAIN=1": GpuRun(parts=("host",), again=True),
    "make gpu-parts": GpuRun("list"),
    "make gpu-keep": GpuRun("keep"),
}


def test_commands_of_the_page_do_what_it_says() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    for command, meant in MEANT.items():
        assert f"\n$ {command} " in page
        asked = ["make", "--dry-run", "--always-make", "--no-print-directory", *shlex.split(command)[1:]]
        done = subprocess.run(asked, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
        [line] = [line for line in done.stdout.splitlines() if "benchmarks/gpu/run.py" in line]
        words = shlex.split(line.partition("benchmarks/gpu/run.py")[2])
        if "--until" in words:
            assert abs(float(words[-1]) - time.time() - 9 * 60) < 60
            words[-1] = "1e9"
        assert tyro.cli(GpuRun, args=words, config=(tyro.conf.FlagCreatePairsOff,)) == meant


def test_power_and_clock_are_those_of_the_gpu_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does not say is left out."""
    script = '#!/bin/sh\n[ "$1" = --id=3 ] && printf "500.0, 1980\\n[N/A], 1980\\n700.0, 1500\\n600.0, 1900\\n"\n'
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    samples = measure.sample_gpu.__wrapped__()
    deadline = time.monotonic() + 30
    while len(samples) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert measure.summarise_samples(samples) == {"watts": 600.0, "mhz": 1900.0}
    assert measure.summarise_samples([]) == {}


def test_the_first_steps_of_a_start_count_for_no_speed() -> None:
    steps = [{"pieces_per_second": pieces, "waiting_for_data": None} for pieces in (1, 1, 1, 100, 300, 200)]
    assert summarise_speed(steps) == {"steps": 6, "pieces_per_second": 200}
