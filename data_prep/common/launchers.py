"""What the environment says of the launcher that started this process."""

from __future__ import annotations

import os


def mpi_size() -> int:
    """Counts the ranks that a launcher such as mpirun started; without a launcher there is one."""
    return _number_from_launcher(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"), 1)


def mpi_rank() -> int:
    """Numbers this process among the ranks that a launcher such as mpirun started; without a launcher it is rank 0."""
    return _number_from_launcher(("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), 0) if mpi_size() > 1 else 0


def _number_from_launcher(names: tuple[str, ...], default: int) -> int:
    """Reads the first of some environment variables that is set: every launcher has a name of its own."""
    return int(next((os.environ[name] for name in names if name in os.environ), default))
