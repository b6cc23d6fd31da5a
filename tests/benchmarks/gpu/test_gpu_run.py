"""The parts of `make gpu` run one by one, and what each has measured is kept whatever the next one does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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

Runner = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def run_parts(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, leaves_group: None) -> Runner:
    """Runs parts that are given as scripts by their names, with more words of the command."""
    monkeypatch.setattr(run, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(processes, "PATIENCE", 1.0)

    def start(scripts: dict[str, str], *more: str) -> int:
        for name, script in scripts.items():
            (tmp_path / f"{name}.py").write_text(script)
        usual = {name: {"name": name, "what": f"what {name} is", "command": [f"{name}.py"]} for name in scripts}
        parts = [GpuPart.model_validate({"minutes": 0.1, **usual[name], **PARTS.get(name, {})}) for name in scripts]
        monkeypatch.setattr(run, "load_parts", lambda: parts)
        settings = tyro.cli(run.GpuRun, args=["--out", str(folder), *more], config=(tyro.conf.FlagCreatePairsOff,))
        return run.measure(settings, open_console(soft_wrap=True))

    return start


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["parts"]
    return found


def times_run(tmp_path: Path, name: str) -> int:
    return len((tmp_path / f"{name}.py.runs").read_text())


def test_a_part_that_fails_or_hangs_takes_nothing_from_the_others(
    run_parts: Runner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is kept before the next begins, one that hangs with what it had at its limit."""

    class Impatient(processes.Child):
        """The limit of what hangs is the moment when it has done all that it does."""

        def wait(self, seconds: float) -> int | None:
            if "three.py" not in str(self.process.args):
                return super().wait(seconds)
            wait_for((tmp_path / "three.py.runs").exists, seconds)
            return super().wait(0.0)

    monkeypatch.setattr(run, "Child", Impatient)
    looks = f"import json; assert json.load(open({str(folder / 'results.json')!r}))['parts']['one']['ended'] == 'done'"
    assert run_parts({"one": HANGS.replace("300", "0"), "two": BAD, "three": HANGS, "four": looks}) == 1
    found = results(folder)
    ends = {"one": "done", "two": "failed", "three": "ran out of time", "four": "done"}
    assert {name: each["ended"] for name, each in found.items()} == ends
    assert found["one"]["measured"] == found["three"]["measured"] == {"figure": 7}
    log = (folder / "log.txt").read_text()
    assert log.count("half way") == 2
    assert "no luck" in log
    assert "two failed; once more: make gpu PARTS=two" in log
    assert run_parts({"setup": BAD, "five": GOOD}) == 1
    assert "five" not in results(folder), "nothing is measured where the setup fails"


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


def test_parts_that_are_done_are_not_run_again_unless_asked(run_parts: Runner, folder: Path, tmp_path: Path) -> None:
    run_parts({"one": GOOD, "two": BAD})
    assert run_parts({"one": GOOD, "two": GOOD}) == 0
    assert times_run(tmp_path, "one") == times_run(tmp_path, "two") == 1
    assert results(folder)["two"]["ended"] == "done"
    assert run_parts({"one": GOOD, "two": GOOD}, "--again", "--parts", "one") == 0
    assert (times_run(tmp_path, "one"), times_run(tmp_path, "two")) == (2, 1)


def test_the_setup_is_looked_at_on_each_machine_and_for_each_commit(
    run_parts: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(run, "BOOT", boot)
    for count, (machine, commit) in enumerate([("one", "abc"), ("two", "abc"), ("two", "def")], 1):
        boot.write_text(machine)
        monkeypatch.setattr(run, "find_commit", lambda commit=commit: commit)
        for _ in range(2 if count == 1 else 1):
            assert run_parts({"setup": GOOD, "one": GOOD}) == 0
            assert times_run(tmp_path, "setup") == count


def finds(**found: str) -> str:
    """A setup that finds this."""
    return f"import json, sys; from pathlib import Path; Path(sys.argv[-1]).write_text(json.dumps({found!r}))"


@pytest.mark.parametrize("other", [{"gpu": "T4"}, slow({"torch": "2.11"}), slow({"commit": "def"})])
def test_what_was_measured_on_another_machine_is_set_aside(
    run_parts: Runner, folder: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    here = {"gpu": "H200", "torch": "2.13", "commit": "abc"}
    run_parts({"setup": finds(**here, date="Monday"), "one": GOOD, "two": GOOD})
    run_parts({"setup": finds(**here, date="Tuesday"), "one": GOOD, "two": GOOD}, "--parts", "setup", "--again")
    assert times_run(tmp_path, "one") == 1
    run_parts({"setup": BAD, "one": GOOD, "two": GOOD}, "--again")  # which says nothing of the machine
    run_parts({"setup": finds(**{**here, **other}), "one": GOOD, "two": GOOD}, "--parts", "one", "--again")
    assert times_run(tmp_path, "one") == 2
    assert set(results(folder)) == {"setup", "one"}
    [aside] = json.loads((folder / "results.json").read_text())["earlier"]
    assert (aside["subject"], aside["parts"]["two"]["measured"]) == (here, {"figure": 7})
    assert "all is measured anew" in (folder / "log.txt").read_text()


def test_no_part_is_started_that_cannot_end_in_time(
    run_parts: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes count from where the whole command began, and a part ends with them at the latest."""
    parts, begun = {"setup": GOOD, "one": GOOD, "long": GOOD, "two": GOOD}, time.time()
    assert run_parts(parts, "--minutes", "38", "--since", str(begun - 29 * 60)) == 75
    assert set(results(folder)) == {"setup", "one", "two"}
    log = (folder / "log.txt").read_text()
    assert "== long: left for the next time: it takes 30 minutes, about" in log
    assert "left for the next time: long; the same command goes on with them" in log
    assert run_parts(parts, "--minutes", "40") == 0
    assert results(folder)["long"]["ended"] == "done"
    limits: list[float] = []

    def run_nothing(command: Sequence[str], limit: float, *_: object) -> str:
        limits.append(limit)
        return "ran out of time" if "one.py" in command[1] else "done"

    monkeypatch.setattr(run, "run_limited", run_nothing)
    assert run_parts(parts, "--minutes", "2", "--since", str(time.time() - 60), "--again") == 1
    assert len(limits) == 3
    assert 20 < min(limits) <= max(limits) < 45


def test_parts_are_chosen_by_how_their_names_begin_and_a_missing_package_costs_only_what_needs_it(
    run_parts: Runner, folder: Path
) -> None:
    lacks = finds(gpu="H200", missing={"transformers": "ImportError: none"})  # type: ignore[arg-type]
    names = ("data", "peer", "peer-large", "peer-base", "peers", "one")
    parts = {"setup": lacks, **dict.fromkeys(names, GOOD)}
    assert run_parts(parts, "--parts", "peer", "one") == 0
    assert set(results(folder)) == {"setup", "data", "peer-large", "peer-base", "one"}
    assert "== peer: left out, for want of transformers" in (folder / "log.txt").read_text()
    told = "pee: no part of this name; there is setup, data, peer, peer-large"
    assert_refusal(told, run_parts, parts, "--parts", "peer", "pee")


def test_a_bare_machine_goes_on_from_the_results_of_another(
    run_parts: Runner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And copies lie flat, none of them too large."""
    setup = finds(gpu="H200", torch="2.13", commit="abc")
    assert run_parts({"setup": setup, "one": GOOD}) == 0
    handed, copies, profile = tmp_path / "handed.json", tmp_path / "copies", folder / "profile/large-128-256/profile"
    (folder / "results.json").rename(handed)
    profile.mkdir(parents=True)
    (profile / "table.txt").write_text("kernels")
    (profile / "trace.json.gz").write_bytes(b"trace" * 10_000)
    monkeypatch.setattr(run, "MOST_BYTES", 40_000)
    words = ("--earlier", str(handed), "--copies", str(copies))
    assert run_parts({"setup": setup, "one": GOOD, "two": GOOD}, *words) == 0
    assert times_run(tmp_path, "one") == times_run(tmp_path, "two") == 1
    assert {path.name for path in copies.rglob("*")} == {"results.json", "log.txt", "table.txt"}
    assert (copies / "results.json").read_bytes() == (folder / "results.json").read_bytes()
    assert "== two: done" in (copies / "log.txt").read_text()
    missing = ("--earlier", str(tmp_path / "nothing.json"))
    assert_refusal(r"nothing\.json: no results there", run_parts, {"one": GOOD}, *missing)


def test_results_of_a_gpu_alone_are_kept_and_share_no_folder_with_a_dry_run(
    run_parts: Runner, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(run, "RESULTS", tmp_path / "kept")
    assert_refusal("no results of a GPU", run_parts, {"one": GOOD}, "--keep")
    found = finds(gpu="H200", hardware="h200", missing={"numba": "none"}, instruction_sets=["avx2"])  # type: ignore[arg-type]
    run_parts({"setup": found, "one": GOOD})
    assert run_parts({"one": GOOD}, "--keep") == 0
    [path] = (tmp_path / "kept").glob("gpu-*.json")
    assert read_results(path)["parts"]["one"]["measured"] == {"figure": 7}
    assert read_results(path)["environment"] == {"gpu": "H200", "hardware": "h200", "instruction_sets": ["avx2"]}
    assert_refusal("has results of a GPU; give another folder", run_parts, {"one": GOOD}, "--dry")
    (folder / "results.json").unlink()
    run_parts({"one": GOOD}, "--dry")
    assert_refusal("no results of a GPU", run_parts, {"one": GOOD}, "--keep")
