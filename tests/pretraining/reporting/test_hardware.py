"""What the hardware can do and has done, in numbers that some computer could have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import ROOT

from pretraining.reporting import hardware
from pretraining.reporting.hardware import measure_flops, read_total_memory

CPU = torch.device("cpu")


def test_the_matrix_rate_is_that_of_matrix_products() -> None:
    """A number that some computer could have, not one a thousand times off."""
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e8 < measure_flops(CPU, dtype, budget=0.0) < 1e15


SCRIPT = """
import subprocess, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # which takes seconds, and is not needed
from pretraining.reporting.hardware import read_peak_memory
cpu = types.SimpleNamespace(type="cpu")
print(read_peak_memory(cpu), flush=True)
if len(sys.argv) == 1:
    block = b"x" * 200_000_000
    print(read_peak_memory(cpu), flush=True)
    subprocess.run([sys.executable, __file__, "child"])
"""


def test_peak_memory_is_this_program_s(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, tmp_path / "script.py"], env=environment)
    before, after, of_child = map(int, printed.split())
    assert after > before + 150_000_000
    assert of_child < before + 50_000_000, "not what the program held that started it"


def test_the_memory_is_what_the_container_or_job_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the limits of all groups that this process is in, one within another."""
    (tmp_path / "slurm/job").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/slurm/job\n")
    monkeypatch.setattr(hardware, "GROUPS", tmp_path)
    monkeypatch.setattr(hardware, "OWN_GROUP", own)
    whole = read_total_memory(CPU)
    assert 1e8 < whole < 1e15
    limits = {"": "max", "slurm": f"{whole // 2}", "slurm/job": f"{whole // 3}"}
    for (folder, limit), least in zip(limits.items(), (whole, whole // 2, whole // 3), strict=True):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        assert read_total_memory(CPU) == least
