"""docs/several-machines.md: its commands as they stand there, on two machines made of network namespaces."""

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.commands import kill_all, list_processes, send_all, set_cable, two_nodes, wait_for
from support.processes import find_program, made_once, shell_environment
from support.training import Place, assert_same, assert_same_curve, records, train_straight

from data_prep.common.files import read_json
from pretraining.processes.ending import ENDED

PAGE = ROOT / "docs" / "several-machines.md"
NAMES = ("node1", "node2")
STATIC, C10D, NO_SSH, PDSH, MPIRUN = "--master-port", "c10d", "--no_ssh", "hosts --master_addr", "mpirun"
"""words by which the page's commands are told apart"""
ONE_THREAD = ["--compute.threads", "1"]
"""as in the runs to compare with: torchrun would give each rank all cores of its machine, and sums other bits"""
LONG = ["--phases.0.steps", "30", "--checkpoints.every", "1"]
"""a run of 33 steps"""
SSH = """\
#!/bin/sh
# ssh as far as launchers need it: enters the other machine, with none of this one's variables.
while true; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac done
host=$1; shift
case $host in
{cases}
esac
"""
Node = Sequence[str]


@pytest.fixture(scope="module")
def long(shared: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 33 steps that nothing happens to."""
    return made_once(tmp_path_factory.getbasetemp(), "long", lambda run: train_straight(shared, run, *LONG))


def typed(words: str) -> list[str]:
    """The page's commands that have these words, in the order of the machines on which they are typed."""
    text = "\n".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(r"^(node\d)\$ (.*)$", text, re.MULTILINE)
    found = [(name, " ".join(line.split())) for name, line in lines]
    chosen = [(name, line) for name, line in found if words in line]
    assert [name for name, _ in chosen] in ([*NAMES], [NAMES[0]]), chosen
    return [line for _, line in chosen]


def as_here(command: str, place: Place, *more: str) -> list[str]:
    """A command of the page with a small model, one rank a machine and folders of this test; the rest as it is."""
    run = place.folder / "run"
    ours = {"bert_large_lamb": place.recipe, "/shared/data/wiki": place.data, "/shared/runs/large": run}
    assert {*ours} <= {*command.split()}
    words = command.replace("--nproc-per-node 8", "--nproc-per-node 1").split()
    if words[0] == "mpirun":
        words[1:1] = "--allow-run-as-root -x PYTHONPATH -x OMP_NUM_THREADS".split()
    return [str({**ours, "hosts": place.folder / "hosts"}.get(word, word)) for word in [*words, *more]]


@contextmanager
def machines(place: Place) -> Iterator[tuple[Node, Node]]:
    """Two machines by the names of the page, with its host file and ssh between them."""
    with two_nodes(*NAMES) as nodes:
        slots = re.findall(r"^node\d slots=8$", PAGE.read_text(), re.MULTILINE)
        (place.folder / "hosts").write_text("\n".join(slots).replace("8", "1") + "\n")
        (place.folder / "bin").mkdir()
        ssh = place.folder / "bin" / "ssh"
        enter = "env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        cases = [f'  {name}) {enter} {shlex.join(node)} sh -c "$*" ;;' for name, node in zip(NAMES, nodes, strict=True)]
        ssh.write_text(SSH.format(cases="\n".join(cases)))
        ssh.chmod(0o755)
        try:
            yield nodes
        finally:
            for node in nodes:
                kill_all(node)


def start(nodes: Sequence[Node], words: str, place: Place, *more: str) -> list[subprocess.Popen[str]]:
    """Types the page's commands, each on its machine."""
    ours = shell_environment()
    ours["PATH"] = f"{place.folder / 'bin'}:{ours['PATH']}"
    how: Any = {"env": ours, "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [[*node, *as_here(line, place, *more)] for node, line in zip(nodes, typed(words), strict=False)]
    return [subprocess.Popen(command, **how) for command in commands]


def finish(started: Sequence[subprocess.Popen[str]], *codes: int, seconds: float = 200) -> list[str]:
    """Waits for all commands, and returns what they have printed."""
    outputs = [process.communicate(timeout=seconds)[0] for process in started]
    assert [process.returncode for process in started] == [*codes], outputs
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(("words", "program"), [(NO_SSH, "deepspeed"), (PDSH, "pdsh"), (MPIRUN, "mpirun")])
def test_two_machines_end_where_one_does(place: Place, straight: Path, words: str, program: str) -> None:
    """By a command on each, or by one that goes over ssh; torchrun's stand below."""
    find_program(program)
    with machines(place) as nodes:
        output = finish(start(nodes, words, place), *[0] * len(typed(words)))[0]
    assert "2 ranks on cpu" in output
    assert_same_curve(place.folder / "run", straight, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "victim", "power_cut"), [(STATIC, 0, True), (C10D, 1, False)])
def test_the_same_command_goes_on_when_a_dead_machine_is_back(
    place: Place, long: Path, words: str, victim: int, power_cut: bool
) -> None:
    run = place.folder / "run"
    with machines(place) as nodes:
        started = start(nodes, words, place, *LONG, *ONE_THREAD)
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and records(run), 150)
        processes = list_processes(nodes[victim])
        wait_for(lambda: len(records(run)) >= 3)
        send_all(signal.SIGSTOP, processes)  # while the machine dies, the run might be done
        if power_cut:
            set_cable(nodes[victim], "down")
        kill_all(nodes[victim])
        finish(started, *((-9, 1) if victim == 0 else (1, -9)))
        ended = read_json(run / ENDED)
        assert (ended["code"], ended["rank"]) == (76, 1 - victim)
        assert len(records(run)) < 33, "it was done before a machine died"
        set_cable(nodes[victim], "up")
        output = finish(start(nodes, words, place, *LONG, *ONE_THREAD), 0, 0)[0]
    assert "2 ranks on cpu" in output
    assert "continues after step" in output
    assert_same(run, long)
