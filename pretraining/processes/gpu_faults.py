"""Tells failures of GPUs apart: a broken machine, which the next start leaves out, or a program that is wrong.

CUDA says both in errors of one kind. Some can only be the machine's; an address that is not allowed may be either.
Where the same step fails so on two machines, it is the program.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import torch

from data_prep.common.codes import Code
from data_prep.common.errors import UserError

BROKEN = (
    *("uncorrectable ECC", "uncorrectable NVLink", "unspecified launch failure", "launch timed out"),
    *("hardware stack error", "no CUDA-capable device", "busy or unavailable", "system not yet initialized"),
)
"""What CUDA says of a GPU that fails."""
UNCLEAR = (
    *("illegal memory access", "misaligned address", "illegal instruction", "invalid program counter"),
    *("CUBLAS_STATUS_EXECUTION_FAILED", "CUBLAS_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_EXECUTION_FAILED"),
)
"""What it says of a GPU that fails, or of a program that is wrong."""
EXCLUDE = Path("preflight", "exclude")
"""In a run's folder: names of the nodes that the next start of its job leaves out."""
FAULTS = "gpu-faults.jsonl"
"""In a run's folder: which GPUs failed, and at which step."""
AGAIN = "the same command goes on from the last checkpoint; a job of Slurm does, without this node"
PROGRAM = "so it is the program and not the machine; with CUDA_LAUNCH_BLOCKING=1 the traceback says where"


class Fault(NamedTuple):
    """A GPU that failed: where, at which step (0: not known), and what CUDA said."""

    node: str
    step: int
    said: str

    @property
    def is_unclear(self) -> bool:
        """Whether it may be the program's."""
        return any(words in self.said for words in UNCLEAR)


class DeviceError(UserError):
    """The GPU of this rank has failed."""

    def __init__(self, error: RuntimeError, step: int = 0) -> None:
        node = os.environ.get("SLURMD_NODENAME") or gethostname()
        self.fault = Fault(node, step, str(error).splitlines()[0])
        self.code = Code.RANK_LOST
        super().__init__(f"{describe(self.fault)}\n{AGAIN}")


def describe(fault: Fault) -> str:
    """Says which GPU failed, and how."""
    return f"a GPU of {fault.node} failed{f' at step {fault.step}' if fault.step else ''}: {fault.said}"


def is_gpu_failure(error: BaseException | None) -> bool:
    """Whether an error is that of a GPU which may be broken. A failed assertion on the device is the program's."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(words in str(error) for words in (*BROKEN, *UNCLEAR))


def note_gpu_failure(error: BaseException | None, run: Path | None) -> BaseException | None:
    """Returns the DeviceError for an error of a GPU, which says whether the machine or the program is at fault; returns
    any other error as it is. Notes the fault in the run's folder, and the node that the next start leaves out if the
    machine is at fault; a second call for the same error adds nothing."""
    found = error if isinstance(error, DeviceError) else None
    if found is None and isinstance(error, RuntimeError) and is_gpu_failure(error):
        found = DeviceError(error)
        found.__cause__ = error
    if found is None or run is None:
        return found or error
    fault, before = found.fault, read_faults(run)
    others = [each for each in before if each.is_unclear and each.step == fault.step and each.node != fault.node]
    if fault.is_unclear and others:
        found.code = Code.MISTAKE
        found.args = (f"{describe(fault)}\nbefore, {describe(others[0])}\n{PROGRAM}",)
    with suppress(OSError):
        if fault not in before:
            with (run / FAULTS).open("a") as file:
                file.write(json.dumps(fault._asdict()) + "\n")
        if found.code == Code.RANK_LOST:
            exclude_node(fault.node, run)
    return found


def read_faults(run: Path) -> list[Fault]:
    """Reads the GPUs that failed in earlier starts of a run; skips damaged lines."""
    found = []
    with suppress(OSError):
        for line in (run / FAULTS).read_text().splitlines():
            with suppress(ValueError, TypeError):
                values: dict[str, Any] = json.loads(line)
                found.append(Fault(**values))
    return found


def exclude_node(node: str, run: Path) -> None:
    """Names a node to be left out by the next start."""
    path = run / EXCLUDE
    path.parent.mkdir(exist_ok=True)
    names = path.read_text().split() if path.exists() else []
    if node not in names:
        with path.open("a") as file:
            file.write(f"{node}\n")
