"""Nodes that are unfit are named before the training begins, and what a user must mend is told."""

import dataclasses
import errno
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any
from unittest.mock import Mock

import pytest
from support.commands import run_main, wait_for
from support.faults import replace
from support.marks import slow
from support.processes import Done, Run, start
from support.training import Place

from cluster import findings, health, preflight
from cluster.health import Health, check_recipe, find_neighbours
from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.common.supervision import exit_now
from pretraining.data.corpora import Corpora
from pretraining.processes.ending import Code

Fault = Callable[[], object]
RATE = 1e12
LOOKED = 0.3  # seconds after which the other nodes have looked at what they look at together


def nothing() -> None:
    pass


def be_node(words: Sequence[str], faulty: int, fault: Fault) -> None:
    """A rank on a node of its own, which is like the others but for its fault."""
    rank = os.environ["RANK"]
    node = os.environ.get("NODE_OF_ALL", f"node{rank}")
    os.environ |= {"SLURMD_NODENAME": node, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    replace(preflight, "measure_flops", lambda *_: RATE)
    findings.SLOW_LINK = 0.1  # a busy machine is no network
    preflight.AGAIN_SECONDS = 0.05
    if fault in (die, exchange_nothing):
        shorten_waits(faulty)
    if fault == compute_nothing:
        preflight.PATIENCE, preflight.LIMIT = 24.0, 6.0
    if int(rank) == faulty:
        fault()
    exit_now(preflight.main(list(words)))


def shorten_waits(faulty: int) -> None:
    """Waits for ranks and links for seconds, and measures no links of sound nodes, which a busy machine makes slow."""
    watch, try_network, exchange = preflight.NodeWatch, preflight.try_network, health.exchange
    replace(preflight, "NodeWatch", lambda *own: (setattr(preflight, "PATIENCE", 16.0), watch(*own))[1])  # type: ignore[func-returns-value]
    replace(preflight, "try_network", lambda *own: (setattr(preflight, "LIMIT", 1.0), try_network(*own))[1])  # type: ignore[func-returns-value]
    replace(health, "exchange", lambda other, *more: exchange(other, *more) if other == faulty else 1e9)


def differ_in_all() -> None:
    """Has other code, another Python, no data, no disk, another GPU that is sick, and a driver that crashes."""

    def describe_gpu(report: Health, _: object) -> str:
        report.faults["GPU"] = "9.0 GiB are taken by other programs"
        return "8 x V100"

    check_data, health.ROOT = health.check_data, Path(__file__).parent
    replace(platform, "python_version", lambda: "2.7.18")
    replace(health, "check_data", lambda words: check_data([f"{words[0]}/elsewhere"]))
    replace(tempfile, "TemporaryFile", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    replace(health, "describe_gpu", describe_gpu)
    crash = RuntimeError("CUDA error: unspecified launch failure\nhints")
    replace(preflight, "measure_flops", Mock(side_effect=crash))


def lose_the_data() -> None:
    """All nodes lose it after the others have seen it."""
    check = health.check_data

    def lose(words: Sequence[str]) -> Any:
        folder = Path(words[0])
        replace(health, "check_data", check)
        time.sleep(LOOKED)
        (folder / "manifest.json").rename(folder / "away")
        return check(words)

    replace(health, "check_data", lose)


def find_the_data_later() -> None:
    """All nodes lose it for longer than a node alone is waited for; this one has it back two looks after the others."""
    check, exists, looks, back = health.check_data, os.path.exists, 0, preflight.FEW + 3

    def look(words: Sequence[str]) -> Any:
        nonlocal looks
        folder = Path(words[0])
        looks += 1
        if looks == 1:
            (folder / "manifest.json").rename(folder / "away")
        if looks == back:
            time.sleep(LOOKED)
            (folder / "away").rename(folder / "manifest.json")
        if looks > back + 2:
            replace(os.path, "exists", exists)
            return check(words)
        replace(os.path, "exists", lambda path: False if Path(path).name == "manifest.json" else exists(path))
        raise UserError(f"{folder / 'manifest.json'}: missing")

    replace(health, "check_data", look)


def exchange_nothing() -> None:
    replace(health, "exchange", lambda *_: time.sleep(60))


def compute_nothing() -> None:
    replace(preflight, "measure_flops", lambda *_: time.sleep(60))


def die() -> None:
    replace(health, "exchange", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def sync_for_ever(mark: Path) -> None:
    def sync(_: int) -> None:
        mark.touch()
        time.sleep(60)

    replace(os, "fsync", sync)


def begin(
    place: Place, *more: object, ranks: int = 3, faulty: int = 1, fault: Fault = nothing, **environment: str
) -> Run:
    words = ["--data", place.data, "--out", place.folder / "run", *more]
    return start(ranks, be_node, [str(word) for word in words], faulty, fault, environment=environment)


def inspect(place: Place, *more: object, **how: Any) -> list[Done]:
    return begin(place, *more, **how).wait()


def excluded(place: Place) -> list[str] | None:
    """The nodes to leave out; None where there is no such file."""
    path = place.folder / "run" / "preflight" / "exclude"
    return path.read_text().splitlines() if path.exists() else None


def report_of(place: Place, name: str = "local-0") -> dict[str, Any]:
    content: dict[str, Any] = read_json(place.folder / "run" / "preflight" / f"{name}.json")
    return content


def expect(place: Place, done: Sequence[Done], code: Code, *messages: str, out: Sequence[str] | None = None) -> None:
    """All end alike, and rank 0 says why; these nodes are left out."""
    assert [rank.code for rank in done] == [code] * len(done), "\n".join(rank.output + rank.errors for rank in done)
    assert "Traceback" not in done[0].errors
    for message in messages:
        assert message in done[0].errors
    assert not any(rank.output + rank.errors for rank in done[1:])
    assert excluded(place) == out


# Fit nodes


def test_fit_nodes_go_on_and_leave_their_figures(place: Place) -> None:
    folder = place.folder / "run" / "preflight"
    folder.mkdir(parents=True)
    (folder / "exclude").write_text("node1\n")
    done = inspect(place, "--recipe", place.recipe, ranks=2, SLURM_JOB_ID="77", SLURM_RESTART_COUNT="2")
    expect(place, done, Code.DONE)
    assert done[0].errors == ""
    assert [line.split()[0] for line in done[0].output.splitlines()[1:3]] == ["node0", "node1"]
    assert [path.name for path in folder.iterdir()] == ["77-2.json"]
    report = report_of(place, "77-2")
    assert (report["code"], report["excluded"], report["reasons"]) == (0, [], [])
    first, second = report["ranks"]
    assert [rank["node"] for rank in report["ranks"]] == ["node0", "node1"]
    assert first["same"] == second["same"]
    assert first["same"].keys() >= {"code", "data", "Python", "torch", "deepspeed", "numpy", "CUDA", "driver", "NCCL"}
    assert min(first["free"], first["rate"], first["links"][0], first["all_reduce"]) > 0


def test_nothing_stays_of_what_measures_the_disk_whatever_ends_it(place: Place) -> None:
    going = begin(place, ranks=1, faulty=0, fault=partial(sync_for_ever, place.folder / "writes"))
    wait_for((place.folder / "writes").exists)
    assert going.goes_on()
    going.signal(signal.SIGKILL)
    going.wait()
    assert list((place.folder / "run").iterdir()) == []


# Nodes that differ from the others


def test_a_node_unlike_the_others_is_left_out(place: Place) -> None:
    reasons = ["code is ", "Python is 2.7.18, and ", "device is 8 x V100, and CPU on most nodes", "data: "]
    reasons += ["cannot be written: Read-only file system", "GPU: 9.0 GiB are taken by other programs"]
    reasons += ["matrix throughput: CUDA error: unspecified launch failure"]
    expect(place, inspect(place, fault=differ_in_all), Code.RANK_LOST, "error: node1: ", *reasons, out=["node1"])
    assert report_of(place)["code"] == Code.RANK_LOST


@pytest.mark.parametrize(
    ("fault", "job", "code"),
    [(lose_the_data, {}, Code.CURE), (find_the_data_later, {"CLOZE_STORAGE_SECONDS": "60"}, Code.DONE)],
)
def test_storage_that_is_gone_is_no_fault_of_a_node(
    place: Place, tmp_path: Path, fault: Fault, job: dict[str, str], code: Code
) -> None:
    """Nor if a node gets it back after the others."""
    own = dataclasses.replace(place, data=tmp_path / "data")
    shutil.copytree(place.data, own.data)
    expect(own, inspect(own, fault=fault, **job), code, "error: data: " if code else "")


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        slow(compute_nothing, "matrix throughput"),
        (exchange_nothing, "nothing comes through to its neighbours"),
    ],
)
def test_a_node_that_hangs_is_left_out(place: Place, fault: Fault, what: str) -> None:
    done = inspect(place, fault=fault)
    expect(place, done, Code.RANK_LOST, f"error: node1: {what}: no answer in", out=["node1"])


def test_links_within_a_node(place: Place) -> None:
    """Ranks of a node exchange data in a ring, with all that they have."""
    found = [find_neighbours(["a", "b", "a", "b", "a"], rank) for rank in range(5)]
    assert found == [[2, None, 4], [3, None, None], [0, 4, None], [1, None, None], [None, 2, 0]]
    expect(place, inspect(place, ranks=2, NODE_OF_ALL="node"), Code.DONE)
    assert min(rank["inside"][0] for rank in report_of(place)["ranks"]) > 0


# Nodes that never answer


@pytest.mark.parametrize(("faulty", "ranks"), [(1, 3), slow(1, 2), slow(0, 3)])
def test_the_node_of_a_rank_that_dies_is_left_out(place: Place, faulty: int, ranks: int) -> None:
    done = inspect(place, faulty=faulty, ranks=ranks, fault=die)
    assert [rank.code for rank in done] == [-9 if number == faulty else 76 for number in range(ranks)]
    assert f"error: {'node1: rank 1' if faulty else 'rank 0'} has ended" in done[0 if faulty else 1].errors
    assert (excluded(place), report_of(place)["code"]) == ([f"node{faulty}"], Code.RANK_LOST)


@pytest.mark.slow
def test_nobody_can_tell_which_end_of_the_only_link_is_bad(place: Place) -> None:
    done = inspect(place, ranks=2, fault=exchange_nothing)
    expect(place, done, Code.RANK_LOST, "node0: nothing comes", "node1: nothing comes", "2 of 2 nodes are unfit")


# What a user must mend


def test_data_and_folder_that_are_amiss_on_all_nodes(place: Place) -> None:
    data, out = place.folder / "data", place.folder / "run"
    shutil.copytree(place.data, data)
    shard = data / "length-32" / "duplicate-0" / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    out.write_text("a file")
    done = inspect(dataclasses.replace(place, data=data), ranks=1)
    expect(place, done, Code.CURE, f"error: disk: {out}: cannot be written: ", f"data: {shard}: ", "its record says")


WRONG = {"--model.hidden 65536": "GB are free, and 2 checkpoints take ", "--phases.0.bach 3": "--phases.0.bach: "}


@pytest.mark.parametrize("words", WRONG)
def test_a_recipe_that_has_no_room_or_is_wrong(place: Place, words: str) -> None:
    done = inspect(place, "--recipe", place.recipe, *words.split(), ranks=1)
    expect(place, done, Code.CURE, "error: recipe: ", WRONG[words])


def test_nodes_share_a_model_only_if_asked(place: Place) -> None:
    inputs = (1e12, Path("gpt2_8b"), ["--phases.0.length", "64"], Corpora.one(place.data), 512)
    check_recipe(*inputs, per_node=8)
    with pytest.raises(UserError, match="does not divide the 4 ranks of a node; take a divisor"):
        check_recipe(*inputs, per_node=4)
    inputs[2].append("--parallel.across_nodes=true")
    check_recipe(*inputs, per_node=4)


@pytest.mark.usefixtures("leaves_group")
def test_one_process_alone_and_values_that_cannot_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", str(place.data), "--out", str(place.folder / "run")]
    assert run_main(preflight.main, *words, "--phases.0.batch", "24", code=2).startswith("error: --phases.0.batch 24: ")
    recipe = [*words, "--recipe", place.recipe, "--phases.1.length", "32", "--time-limit", "1h"]  # as a job's own
    run_main(preflight.main, *recipe)
    [rank] = report_of(place)["ranks"]
    assert (rank["node"], rank["rate"] > 0) == (gethostname(), True)
    slurm = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "PROCID": "0", "NODEID": "7", "STEP_TASKS_PER_NODE": "1(x2)"}
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run_main(preflight.main, *words, code=2).startswith("error: SLURM_NODEID=7: ")
