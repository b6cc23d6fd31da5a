"""Each side of a contest is what it says to be, and one that fails is told."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from rich.console import Console
from support.pretraining_reference import SMALL, random_batch
from support.processes import Done, run_program
from support.shards import make_shards

from benchmarks import sides, throughput, training_sides
from benchmarks.measure import read_results
from benchmarks.sides import Calls, NoMemoryError, SideFailedError, SideSpec, open_sides
from benchmarks.throughput import Bench, Throughput
from benchmarks.training_sides import Contest, TheirTraining
from data_prep.common.errors import UserError

SETTINGS = ("GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

MAKES_THE_PEER = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})  # as a script's process has it, and what it spawns
import torch
from benchmarks.throughput import SIDES
from pretraining.architectures.declaration import make_shape
from pretraining.model.shape import Shape
SIDES["transformers"].make(make_shape("tiny", 1000), torch.device("cpu"), torch.float32)
assert not {{*os.environ}} & {{*{SETTINGS!r}}}
"""


@pytest.mark.slow
def test_the_plain_peer_has_none_of_our_settings() -> None:
    """transformers looks for packages by their names, and must find none of our scripts."""
    plain = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    subprocess.run([sys.executable, "-c", MAKES_THE_PEER], env=plain, cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of lengths 32 and 64."""
    return make_shards(tmp_path_factory.mktemp("shards"))


def make_bench(shards: Path, *sides: str, **settings: Any) -> Bench:
    """Contests of these sides on CPUs."""
    return Bench(Throughput(**settings), shards, CPU, torch.float32, sides, Console(quiet=True))


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides that load nothing are forks; those that are spawned stand below."""
    monkeypatch.setattr(sides, "multiprocessing", SimpleNamespace(get_context=lambda _: get_context("fork")))


def failing(error: Exception, *_: Any) -> Any:
    """A side that cannot be made."""
    raise error


def dying(number: int, *_: Any) -> Any:
    """A side that a signal ends."""
    faulthandler.disable()  # that of pytest
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(failing, UserError("no bf16 here")), "peer: no bf16 here"),
        (partial(failing, torch.OutOfMemoryError("CUDA out of memory")), "peer: no memory for such a step"),
        (partial(failing, RuntimeError("shapes differ")), "peer: RuntimeError: shapes differ"),
        (partial(dying, signal.SIGKILL), "peer: was killed, most likely for want of memory: the machine has"),
        (partial(dying, signal.SIGABRT), "peer: was ended by SIGABRT"),
    ],
)
@pytest.mark.usefixtures("forks")
def test_a_side_that_cannot_go_on_says_why(make: Any, told: str) -> None:
    with pytest.raises(SideFailedError, match=told), open_sides({"peer": SideSpec(make)}):
        pass


class Counting:
    """A loop that has two turns."""

    def take_turns(self, calls: Calls) -> None:
        for number in range(2):
            calls.next(number)
        raise UserError("no more")


@pytest.mark.usefixtures("forks")
def test_a_loop_goes_on_for_one_turn_at_a_time() -> None:
    """And what goes wrong in it is raised where the turn was asked for."""
    with open_sides({"peer": SideSpec(Counting)}) as opened:
        assert opened["peer"].ask("train") == 1
        with pytest.raises(SideFailedError, match="peer: no more"):
            opened["peer"].ask("train")


@pytest.mark.slow
def test_a_contest_is_measured_kept_and_told(tiny_shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"

    def measured(*words: str) -> Done:
        usual = ("--shards", str(tiny_shards), "--peer", "none", "--out", str(out), "--contests")
        return run_program("benchmarks/throughput.py", (*usual, *words), ROOT, 90)

    done = measured("tiny-32-2", "--rounds", "2", "--profile", str(tmp_path / "profile"))
    assert done.code == 0, done.errors
    found = read_results(out)
    contest = found["contests"]["tiny-32"]
    assert contest["times_as_fast_as"] == {}
    assert contest["sides"]["cloze"]["sequences_per_second"]["lowest"] > 0
    assert found["ceilings"]["memory_gb"] > 0
    assert found["environment"]["command"].startswith("python benchmarks/throughput.py --shards")
    assert [path.name for path in tmp_path.glob("profile/*/profile/*.txt")] == ["table.txt"]
    assert "sequences/s" in done.output
    assert done.errors == ""
    again = measured("tiny-32-1", "--dtype", "fp32", "--rounds", "1")
    assert again.code == 0, again.errors
    assert read_results(out)["contests"]["tiny-32"]["dtype"] == "fp32"


def test_a_contest_without_memory_goes_on_with_half(tiny_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(contest: Contest, *_: object) -> dict[str, Any]:
        if contest.sequences > 2:
            raise NoMemoryError("peer: no memory for such a step")
        return {"ran": contest.sequences}

    monkeypatch.setattr(throughput, "run_contest", run)
    bench = make_bench(tiny_shards, "cloze")
    assert throughput.run_smaller(Contest.parse("tiny-32-8"), bench, print)[1] == {"ran": 2}


@pytest.mark.slow
def test_what_is_measured_is_kept_before_the_next_side_begins(
    tiny_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(throughput.SIDES, "broken", SideSpec(partial(failing, UserError("no such side"))))
    monkeypatch.setattr(throughput, "measure_flops", lambda *_: 1e9)
    bench, keeps = make_bench(tiny_shards, "cloze", "broken", rounds=1, apart=True), list[dict[str, Any]]()
    with pytest.raises(SideFailedError, match="no such side"):
        throughput.run_contest(Contest.parse("tiny-32-2"), bench, keeps.append)
    assert [[*found["sides"]] for found in keeps] == [["cloze"]]


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_contest_is_read_from_its_words() -> None:
    assert Contest.parse("large-512-64") == Contest("large", 512, 64)
    assert Contest.parse("large-512-64").name == "large-512"


@pytest.mark.parametrize("text", ["large-512", "huge-128-4", "base-128-many", "base-128-4-4", ""])
def test_what_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="give SIZE-LENGTH-SEQUENCES, such as base-128-32"):
        Contest.parse(text)


def test_the_peers_batch_is_padded_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its users pad in the workers of a DataLoader, while the step before is computed."""
    theirs = TheirTraining(SMALL, CPU, torch.float32)
    theirs.take(random_batch([7, 12], SMALL.vocabulary))
    monkeypatch.setattr(training_sides, "pad_batch", None)  # nobody can call it now
    before = [each.clone() for each in theirs.model.parameters()]
    theirs.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, theirs.model.parameters(), strict=True))
