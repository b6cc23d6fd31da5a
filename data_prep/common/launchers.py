"""Which process of a run this one is, as torchrun, deepspeed, mpirun or srun says in the environment.

Preparation counts the ranks that MPI connects (`mpi_size`), training those that PyTorch will (`find_world`), which must
know more of them: where rank 0 is, and who shares a machine.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from data_prep.common.errors import UserError

LOOPBACK = "127.0.0.1"
PORTS = range(20000, 30000)  # below those that Linux hands out by itself
START = "start the ranks with torchrun, deepspeed, srun or mpirun"
BATCH_STEP = 0xFFFFFFF0  # Slurm numbers batch scripts and interactive shells from here: no ranks of a step


@dataclass(frozen=True)
class World:
    """One process's place among all processes of its run, which are called ranks."""

    rank: int = 0
    size: int = 1
    """how many ranks the run has"""
    local_rank: int = 0
    """this rank's number among those on the same machine"""
    local_size: int = 1
    """how many ranks run on this machine"""
    address: str = LOOPBACK
    """where the machine of rank 0 is"""
    port: int = 0
    """where rank 0 listens there; 0 in a run of one process, in which nobody has to"""
    launcher: str = "plain"
    """what started the processes, as messages name it"""

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise UserError(
                f"{self.launcher}: rank {self.rank} of {self.size}, and {self.local_rank} of {self.local_size} on this "
                f"machine, cannot be: ranks count from 0\n{START}, and set none of their variables yourself"
            )

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def find_world(environment: Mapping[str, str]) -> World:
    """Finds the place of this process among its ranks, as the launcher says it; without a launcher it is alone.

    The innermost launcher counts: torchrun may run under srun, and mpirun starts its helpers with srun.
    """
    if "RANK" in environment:
        return _from_torch(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _from_mpi(environment, "OMPI_COMM_WORLD_", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if "MPI_LOCALNRANKS" in environment:  # MPICH, Intel MPI, MVAPICH
        return _from_mpi(environment, "", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    step = all(environment.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
    if step and _number(environment, "SLURM_STEP_ID") < BATCH_STEP:
        return _from_slurm(environment)
    told = max(_number(environment, name, default=1) for name in ("PMI_SIZE", "WORLD_SIZE"))
    if told > 1 or "PMIX_RANK" in environment:
        raise UserError(
            "PMI_SIZE, PMIX_RANK or WORLD_SIZE is set, but RANK is not, nor what says how many ranks a machine has\n"
            f"{START} (of mpirun that of Open MPI or MPICH); for one process: unset these variables"
        )
    return World()


def mpi_size() -> int:
    """Counts the ranks that a launcher such as mpirun started; without a launcher there is one."""
    return _number(os.environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", default=1)


def mpi_rank() -> int:
    """Numbers this process among the ranks that a launcher such as mpirun started; without a launcher it is rank 0."""
    return _number(os.environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", default=0) if mpi_size() > 1 else 0


def name_this_rank() -> str:
    """Names this process, with its host, at the beginning of a message; nothing on rank 0, which speaks for all."""
    return f"rank {mpi_rank()} on {socket.gethostname()}: " if mpi_rank() else ""


def started_by_mpi() -> bool:
    """Whether the mpirun of Open MPI, MPICH or a relative of theirs started this process."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "MPI_LOCALNRANKS" in os.environ


def missing_tasks(environment: Mapping[str, str], world: World) -> int:
    """How many tasks Slurm has reserved without starting them, which happens where a batch script forgets `srun`; 0 if
    all is well. The script itself has SLURM_PROCID=0 and SLURM_NTASKS=4, but must not wait for three others."""
    tasks = environment.get("SLURM_NTASKS", "")
    return int(tasks) if world.launcher == "plain" and tasks.isdigit() and int(tasks) > 1 else 0


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Reads the whole number in the first of these variables that is set, else returns the default, if there is one."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None and default is not None:
        return default
    if name is None or not re.fullmatch(r"\d+", environment[name]):
        fault = f"{name}={environment[name]!r} is no whole number" if name else f"{' or '.join(names)} is not set"
        raise UserError(f"{fault}\n{START}, which set it")
    return int(environment[name])


def _from_torch(environment: Mapping[str, str]) -> World:
    """A process of torchrun or deepspeed, or one whose variables somebody has set by hand."""
    name = "deepspeed" if "LOCAL_SIZE" in environment else "RANK and WORLD_SIZE"
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else name
    rank, ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if ranks == 1:
        return World(rank, ranks, launcher=name)
    if not environment.get("MASTER_ADDR"):
        raise UserError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not\nset it to the address of rank 0")
    local_rank, local_ranks = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    port = _number(environment, "MASTER_PORT", default=29500)
    return World(rank, ranks, local_rank, local_ranks, environment["MASTER_ADDR"], port, name)


def _from_mpi(environment: Mapping[str, str], prefix: str, names: Sequence[str]) -> World:
    """mpirun, which says who the ranks are, but not on which of several machines rank 0 runs."""
    rank, ranks, local_rank, local_ranks = (_number(environment, prefix + name) for name in names)
    if ranks == 1:
        return World(rank, launcher="mpirun")
    job = next((environment[name] for name in ("PMIX_NAMESPACE", "PMI_PORT") if name in environment), "")
    address = environment.get("MASTER_ADDR") or (LOOPBACK if ranks == local_ranks else None)
    if address is None:
        raise UserError(
            "mpirun started ranks on several machines, and does not say where rank 0 is\n"
            "start them with: mpirun -x MASTER_ADDR=<host of rank 0> …"
        )
    port = _number(environment, "MASTER_PORT", default=PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    return World(rank, ranks, local_rank, local_ranks, address, port, "mpirun")


def _from_slurm(environment: Mapping[str, str]) -> World:
    """A task of srun, which speaks of nodes and tasks where torch speaks of machines and ranks."""
    rank, ranks = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    if ranks == 1:
        return World(rank, launcher="srun")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    each, node = (expand_tasks(tasks), _number(environment, "SLURM_NODEID")) if tasks else ([ranks], 0)
    if node >= len(each):
        raise UserError(f"SLURM_NODEID={node}: the step has nodes 0 to {len(each) - 1}\nstart the ranks with srun")
    local_ranks = each[node]
    address = environment.get("MASTER_ADDR") or (LOOPBACK if local_ranks == ranks else first_node(nodes))
    # Steps of one job, and jobs that follow one another, get different ports.
    own = 16 * _number(environment, "SLURM_JOB_ID", "SLURM_JOBID") + _number(environment, "SLURM_STEP_ID")
    port = _number(environment, "MASTER_PORT", default=PORTS[own % len(PORTS)])
    return World(rank, ranks, _number(environment, "SLURM_LOCALID"), local_ranks, address, port, "srun")


def first_node(nodes: str) -> str:
    """The first host of Slurm's short form: `node[003-010,12],other` -> `node003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError("Slurm does not say on which nodes this step runs\nset MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def expand_tasks(tasks: str) -> list[int]:
    """The tasks of every node from Slurm's short form: `4(x2),3` -> [4, 4, 3]."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in tasks.split(",")]
    if not all(found):
        raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks!r} is not understood\nstart the ranks with srun")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))]
