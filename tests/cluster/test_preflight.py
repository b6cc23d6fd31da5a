"""Nodes that are unfit are named before the training begins, and what a user must mend is told."""

from __future__ import annotations

import dataclasses
import io
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import ADDRESSES, node_names, run_main, two_nodes
from support.marks import slow
from support.processes import ROOT, Done, Run, rank_environment, start, wait_for
from support.training import Place
from support.unfit_nodes import (
    Fault,
    be_node,
    compute_nothing,
    die,
    differ_in_all,
    exchange_nothing,
    exchange_slowly,
    find_the_data_later,
    have_another_python,
    lose_the_data,
    multiply_slowly,
    nothing,
    sync_for_ever,
)

from cluster import preflight
from cluster.findings import compare_reports
from cluster.health import CPU, Health, check_recipe, find_neighbours
from data_prep.common.errors import UserError
from data_prep.common.files import read_json
from data_prep.shards import Manifest
from pretraining.processes.ending import Code

SCRIPT = ROOT / "cluster" / "preflight.py"
PORT = 29533
PATIENT = {"CLOZE_STORAGE_SECONDS": "60"}


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


@pytest.mark.usefixtures("leaves_group")
def test_one_process_alone(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--data", str(place.data), "--out", str(place.folder / "run")]) == Code.DONE
    assert capsys.readouterr().err == ""
    assert report_of(place)["ranks"][0]["rate"] > 0


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
    [
        (lose_the_data, {}, Code.CURE),
        pytest.param(lose_the_data, {"BACK_AFTER": "2", **PATIENT}, Code.DONE, marks=pytest.mark.timed),
        (find_the_data_later, PATIENT, Code.DONE),
    ],
)
def test_storage_that_is_gone_is_no_fault_of_a_node(
    place: Place, tmp_path: Path, fault: Fault, job: dict[str, str], code: Code
) -> None:
    """Nor if a node gets it back after the others."""
    own = dataclasses.replace(place, data=tmp_path / "data")
    shutil.copytree(place.data, own.data)
    expect(own, inspect(own, fault=fault, **job), code, "error: data: " if code else "")


@pytest.mark.parametrize(
    ("fault", "node", "words", "message"),
    [
        slow(exchange_slowly, 2, [], "error: node2: its links reach "),
        slow(compute_nothing, 1, ["--patience", 24], "error: node1: matrix throughput: no answer in"),
        (
            exchange_nothing,
            1,
            ["--patience", 24],
            "error: node1: nothing comes through to its neighbours: no answer in",
        ),
    ],
)
def test_a_node_that_is_slow_or_hangs_is_left_out(
    place: Place, fault: Fault, node: int, words: list[object], message: str
) -> None:
    start = time.monotonic()
    done = inspect(place, *words, faulty=node, fault=fault)
    expect(place, done, Code.RANK_LOST, message, out=[f"node{node}"])
    assert time.monotonic() - start < 45 or not words


@pytest.mark.timed
def test_a_slow_cpu_is_told_and_kept(place: Place) -> None:
    message = "warning: node1: its matrix throughput is 60% of the median\n"
    expect(place, inspect(place, fault=multiply_slowly), Code.DONE, message)


def test_links_within_a_node(place: Place) -> None:
    """Ranks of a node exchange data in a ring, with all that they have."""
    assert [find_neighbours(["a", "b", "a", "b", "a"], rank) for rank in range(5)] == [
        [2, None, 4],
        [3, None, None],
        [0, 4, None],
        [1, None, None],
        [None, 2, 0],
    ]
    expect(place, inspect(place, ranks=2, NODE_OF_ALL="node"), Code.DONE)
    assert min(rank["inside"][0] for rank in report_of(place)["ranks"]) > 0


def test_a_node_with_a_slow_link_between_its_gpus_is_left_out() -> None:
    speeds = {"node0": (200e9, 210e9), "node1": (200e9, 30e9), "node2": (190e9, 200e9)}

    def report(device: str) -> list[Health]:
        same = {"device": device}
        return [Health(name, same, rate=1.0, inside=[speed]) for name, own in speeds.items() for speed in own]

    found = compare_reports(report("2 x V100"))
    assert found.excluded == ["node1"]
    assert found.explain() == ["node1: a link between its ranks reaches 16% of the median"]
    found = compare_reports(report(CPU))
    assert (found.excluded, found.notes) == ([], ["node1: a link between its ranks reaches 16% of the median"])


# Nodes that never answer


@pytest.mark.parametrize(("faulty", "ranks"), [(1, 3), slow(1, 2), slow(0, 3)])
def test_the_node_of_a_rank_that_dies_is_left_out(place: Place, faulty: int, ranks: int) -> None:
    done = inspect(place, "--patience", 40, faulty=faulty, ranks=ranks, fault=die)
    assert [rank.code for rank in done] == [-9 if number == faulty else 76 for number in range(ranks)]
    assert f"error: {'node1: rank 1' if faulty else 'rank 0'} has ended" in done[0 if faulty else 1].errors
    assert (excluded(place), report_of(place)["code"]) == ([f"node{faulty}"], Code.RANK_LOST)


@pytest.mark.slow
def test_nobody_can_tell_which_end_of_the_only_link_is_bad(place: Place) -> None:
    done = inspect(place, "--patience", 24, ranks=2, fault=exchange_nothing)
    expect(place, done, Code.RANK_LOST, "node0: nothing comes", "node1: nothing comes", "2 of 2 nodes are unfit")


# What a user must mend


def test_two_nodes_that_differ_are_both_named(place: Place) -> None:
    done = inspect(place, ranks=2, fault=have_another_python)
    expect(place, done, Code.CURE, "error: Python: ", "on node0, 2.7.18 on node1")


def test_data_and_folder_that_are_amiss_on_all_nodes(place: Place) -> None:
    data, out = place.folder / "data", place.folder / "run"
    shutil.copytree(place.data, data)
    shard = data / "length-32" / "duplicate-0" / "shard-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])
    out.write_text("a file")
    done = inspect(dataclasses.replace(place, data=data), ranks=1)
    expect(place, done, Code.CURE, f"error: disk: {out}: cannot be written: ", f"data: {shard}: ", "its record says")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model.hidden", 65536), "GB are free, and 2 checkpoints take "),
        (("--phases.0.bach", 3), "error: recipe: --phases.0.bach: "),
    ],
)
def test_a_recipe_that_has_no_room_or_is_wrong(place: Place, words: tuple[object, ...], told: str) -> None:
    expect(place, inspect(place, "--recipe", place.recipe, *words, ranks=1), Code.CURE, "error: recipe: ", told)


def test_nodes_share_a_model_only_if_asked(place: Place) -> None:
    inputs = (1e12, Path("gpt2_8b"), ["--phases.0.length", "64"], Manifest.read(place.data), 512)
    check_recipe(*inputs, per_node=8)
    with pytest.raises(UserError, match="does not divide the 4 ranks of a node; take a divisor"):
        check_recipe(*inputs, per_node=4)
    inputs[2].append("--parallel.across_nodes=true")
    check_recipe(*inputs, per_node=4)


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_group")
def test_a_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    assert "cannot be written: No space left on device\nmake room" in run_main(
        preflight.main, "--data", place.data, "--out", place.folder / "run", code=2
    )


def test_values_that_cannot_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--data", str(place.data), "--out", str(place.folder / "run")]
    for wrong in (*(["--patience", each] for each in ("0", "-1", "nan", "inf")), ["--phases.0.batch", "24"]):
        assert run_main(preflight.main, *words, *wrong, code=2).startswith(f"error: {' '.join(wrong)}: ")
    recipe = [*words, "--recipe", str(place.recipe), "--phases.1.length", "32", "--time-limit", "1h"]  # as a job's own
    run_main(preflight.main, *recipe)
    slurm = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "PROCID": "0", "NODEID": "7", "STEP_TASKS_PER_NODE": "1(x2)"}
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert run_main(preflight.main, *words, code=2).startswith("error: SLURM_NODEID=7: ")


# Two machines


def slow_down(node: Sequence[str]) -> None:
    """Lets the cable of a pretended machine carry 400 Mbit/s."""
    within = list(node[:4])
    names = subprocess.run([*within, "ls", "/sys/class/net"], capture_output=True, text=True, check=True).stdout.split()
    device = next(name for name in names if name.startswith("cz"))
    limit = ["rate", "400mbit", "burst", "64kb", "latency", "100ms"]
    command = [*within, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit]
    if shutil.which("tc") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("no tc here, or no right to slow a network down")


@pytest.mark.slow
@pytest.mark.timed
def test_the_speed_of_a_cable_between_two_machines(place: Place) -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(place.data), "--out", str(place.folder / "run")]
    processes = []
    with two_nodes() as nodes:
        for rank, node in enumerate(nodes):
            slow_down(node)
            own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": ADDRESSES[0]}
            processes.append(subprocess.Popen([*node, *command], env={**rank_environment(rank, 2, PORT), **own}))
        try:
            codes = [process.wait(60) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0, 0]
    ranks = report_of(place)["ranks"]
    assert [rank["node"] for rank in ranks] == node_names(nodes)
    assert all(25e6 < rank["links"][0] < 75e6 for rank in ranks)
