"""Runs under real launchers, which are fresh processes."""

from __future__ import annotations

import os
import sys

import pytest
from support.marks import slow
from support.processes import free_port, run_launcher, spawn
from support.training import COMMAND, Place, assert_well, be_train_py, records

from pretraining import train as entry

LAUNCHED = [
    slow("torchrun --nproc-per-node 2 --"),
    slow("deepspeed --num_gpus 2 --master_port {port}"),
    slow("mpirun --allow-run-as-root --oversubscribe -n 2 {python}"),
]


@pytest.mark.parametrize("command", LAUNCHED)
def test_launchers(place: Place, command: str) -> None:
    words = command.format(python=sys.executable, port=free_port()).split()
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    if words[0] == "torchrun":
        environment["MASTER_PORT"] = str(free_port())
    arguments = [*words, str(COMMAND), *place.command("run", "--phases.0.steps", "2")]
    done = run_launcher(arguments, environment, place.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 ranks on cpu, 1 thread each ({words[0]}); data" in done.stdout
    assert [record["step"] for record in records(place.folder / "run")] == [1, 2, 3, 4, 5]
    if words[0] != "deepspeed":  # which tells of itself
        assert done.stderr == ""


def train_in_a_step(command: list[str]) -> None:
    """What a rank does that knows of no launcher but Slurm."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    be_train_py(command)


@pytest.mark.slow
def test_srun_sets_all_that_is_needed(place: Place) -> None:
    """Without Slurm: its variables of a step of one task. `deepspeed`'s --local_rank is passed over."""
    step = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    command = place.command("run", "--local_rank=0", "--phases.0.steps", "1")
    assert "1 rank on cpu, 1 thread each (srun)" in assert_well(spawn(1, train_in_a_step, command, environment=step))


@pytest.mark.usefixtures("leaves_group")
def test_a_slurm_job_without_srun_is_warned_of(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert entry.main(["--recipe", str(place.recipe), "--data", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("warning: Slurm reserved 4 tasks, and this is one process alone")
