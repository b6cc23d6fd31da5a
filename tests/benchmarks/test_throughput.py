"""Each side of a contest is what it says to be, and one that fails is told."""

import faulthandler
import os
import signal
import subprocess
import sys
from dataclasses import replace
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
from support.training import Place

from benchmarks import sides, throughput, training_sides
from benchmarks.measure import read_results
from benchmarks.sides import Answer, NoMemoryError, SideFailedError, SideSpec, open_sides, sides_in_this_process
from benchmarks.tables import summarise_contests
from benchmarks.throughput import Bench, Throughput
from benchmarks.training_sides import Contest, OurTraining, TheirTraining, join_micro_batches
from data_prep.common.errors import UserError
from pretraining.huggingface.weights import import_weights
from pretraining.objectives.declaration import build_model, find_objective

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


PEERS = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "gpt": "GPT2LMHeadModel",
    "modern": "ModernBertForMaskedLM",
}


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
        (partial(dying, signal.SIGKILL), "peer: was killed, most likely for want of memory"),
        (partial(dying, signal.SIGABRT), "peer: ended with exit code -6"),
    ],
)
@pytest.mark.usefixtures("forks")
def test_a_side_that_cannot_go_on_says_why(make: Any, told: str) -> None:
    """In a process of its own, and in this one if that survives it."""
    with pytest.raises(SideFailedError, match=told), open_sides({"peer": SideSpec(make)}):
        pass
    if make.func is failing:
        with sides_in_this_process(), pytest.raises(SideFailedError, match=told), open_sides({"peer": SideSpec(make)}):
            pass


class Counting:
    """A loop that has two turns."""

    def take_turns(self, answer: Answer) -> None:
        for number in range(2):
            answer(number)
        raise UserError("no more")


@pytest.mark.usefixtures("forks")
def test_a_loop_goes_on_for_one_turn_at_a_time() -> None:
    """And what goes wrong in it is raised where the turn was asked for."""
    with open_sides({"peer": SideSpec(Counting)}) as opened:
        assert opened["peer"].ask("train") == 1
        with pytest.raises(SideFailedError, match="peer: no more"):
            opened["peer"].ask("train")


@pytest.mark.slow
def test_a_contest_is_measured_kept_and_told(shared: Place, tmp_path: Path) -> None:
    out = tmp_path / "found.json"

    def measured(*words: str) -> Done:
        usual = ("--shards", str(shared.data), "--out", str(out), "--contests")
        return run_program("benchmarks/throughput.py", (*usual, *words), ROOT, 90)

    done = measured("tiny-32-2", "--rounds", "2", "--against", "cloze", "--profile", str(tmp_path / "profile"))
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
    out.unlink()
    beside = measured("modern:tiny-32-2", "--rounds", "1", "--against", "transformers", "cloze, bert")
    assert beside.code == 0, beside.errors
    found = read_results(out)
    assert found["benchmark"] == "architectures"
    table = next(iter(summarise_contests(found)))
    assert (table.rows[0][0], table.head[-1]) == ("modern tiny at 32, 2 sequences", "cloze, bert")


def test_a_contest_without_memory_goes_on_with_half(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(contest: Contest, *_: object) -> dict[str, Any]:
        if contest.sequences > 2:
            raise NoMemoryError("peer: no memory for such a step")
        return {"ran": contest.sequences}

    monkeypatch.setattr(throughput, "run_contest", run)
    bench = make_bench(shared.data, "cloze")
    assert throughput.run_smaller(Contest.parse("tiny-32-8"), bench, print) == {"ran": 2}


def test_sides_that_do_not_fit_in_memory_together_run_apart(tmp_path: Path) -> None:
    for words, names, apart in (
        ("large-128-64", ("cloze", "cloze, LAMB"), False),
        ("large-128-auto", ("cloze",), True),
        ("large-128-64", ("cloze", "transformers, compiled"), True),
    ):
        bench = make_bench(tmp_path, *names)
        assert replace(bench, device=torch.device("cuda")).runs_apart(Contest.parse(words)) == apart
        assert not bench.runs_apart(Contest.parse(words))


@pytest.mark.slow
def test_what_is_measured_is_kept_before_the_next_side_begins(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(throughput.SIDES, "broken", SideSpec(partial(failing, UserError("no such side"))))
    monkeypatch.setattr(throughput, "measure_flops", lambda *_, **__: 1e9)
    bench, keeps = make_bench(shared.data, "cloze", "broken", rounds=1), list[dict[str, Any]]()
    with pytest.raises(SideFailedError, match="no such side"):
        throughput.run_contest(Contest.parse("tiny-32-2"), bench, apart=True, keep=keeps.append)
    assert [[*found["sides"]] for found in keeps] == [["cloze"]]


CPU = torch.device("cpu")


def test_a_contest_is_read_from_its_words() -> None:
    assert Contest.parse("large-512-64") == Contest("large", 512, 64)
    assert Contest.parse("large-512-64").name == "large-512"
    modern = Contest.parse("modern:mini-1024-auto")
    assert modern == Contest("mini", 1024, training_sides.AUTO, "modern")
    assert (modern.name, modern.make_shape(1000).positions) == ("modern:mini-1024-auto", 1024)
    assert Contest.parse("modern:base-128-2").make_shape(1000).layers == 22


@pytest.mark.parametrize("text", ["large-512", "huge-128-4", "bag:base-128-2", "base-128-many", "base-128-4-4", ""])
def test_what_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="give SIZE-LENGTH-SEQUENCES, such as base-128-32"):
        Contest.parse(text)


@pytest.mark.parametrize(("name", "theirs"), PEERS.items())
def test_both_sides_learn_the_same_by_every_architecture(name: str, theirs: str, shared: Place) -> None:
    """Their class, with the same weights and without dropout, has the same loss on the batch that it is given."""
    shape, read = Contest.parse(f"{name}:tiny-32-3").open(shared.data)
    peer, batch = TheirTraining(shape, CPU, torch.float32), read(0)
    assert type(peer.model).__name__ == theirs
    peer.take(batch)
    ours = build_model(peer.shape).eval()
    ours.load_state_dict(import_weights(peer.model.state_dict(), ours.shape)[0])
    wanted = find_objective(shape).loss(ours(batch), join_micro_batches([batch]))
    torch.testing.assert_close(peer.model.eval()(**peer.inputs).loss, wanted)
    peer.compute()


@pytest.mark.usefixtures("leaves_group")
def test_another_architecture_of_the_same_size_takes_the_same_batches(shared: Place) -> None:
    shape, read = Contest.parse("modern:tiny-32-2").open(shared.data)
    bert = OurTraining(shape, CPU, torch.float32, other="bert")
    own = bert.shape
    assert (own.architecture, own.layers, own.hidden) == ("bert", shape.layers, shape.hidden)
    assert own.learns == shape.learns
    assert bert.step(read(0)) > 0
    shape, _ = Contest.parse("gpt:tiny-32-2").open(shared.data)
    with pytest.raises(UserError, match='"modern": its pieces see'):
        OurTraining(shape, CPU, torch.float32, other="modern")


def test_the_peers_batch_is_padded_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its users pad in the workers of a DataLoader, while the step before is computed."""
    theirs = TheirTraining(SMALL, CPU, torch.float32)
    theirs.take(random_batch([7, 12], SMALL.vocabulary))
    monkeypatch.setattr(training_sides, "pad_batch", None)  # nobody can call it now
    before = [each.clone() for each in theirs.model.parameters()]
    theirs.compute()
    assert not all(torch.equal(a, b) for a, b in zip(before, theirs.model.parameters(), strict=True))
