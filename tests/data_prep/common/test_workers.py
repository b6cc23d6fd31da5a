"""A machine gets as many workers as it has cores and memory for; they run no code of others."""

import os
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from conftest import ROOT

from data_prep.common import capacity
from data_prep.common.capacity import available_memory, room_for_workers

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "available", "workers"), [(8, 64 * GB, 8), (64, 4 * GB, 10), (8, GB, 1), (8, 0, 1), (1, 0, 1)]
)
def test_memory_limits_the_workers(cores: int, available: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "num_cores", lambda: cores)
    monkeypatch.setattr(capacity, "available_memory", lambda: available)
    assert room_for_workers() == workers


def test_what_the_machine_has_is_found(system: Path) -> None:
    assert 0 < (available_memory() or 0) < 1 << 50
    assert found(system) == 16 * GB  # without groups
    (system / "proc/meminfo").unlink()
    assert found(system) is None


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 16 GB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  32000000 kB\nMemAvailable: 15625000 kB\n")
    return tmp_path


def limit(folder: Path, most: str, used: int, cache: int, version: int) -> None:
    """Gives a group of processes a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    limit, usage, total = ("max", "current", "") if version == 2 else ("limit_in_bytes", "usage_in_bytes", "total_")
    texts = {limit: most, usage: used, "stat": f"anon 5\n{total}inactive_file {cache}"}
    for name, text in texts.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def found(system: Path) -> int | None:
    return available_memory(system / "proc", system / "cgroup")


@pytest.mark.parametrize(
    ("version", "line"), [(2, "0::/slurm/job_7/step_0"), (1, "5:cpuset,memory:/slurm/job_7/step_0")]
)
def test_the_tightest_group_counts_without_its_cache(version: int, line: str, system: Path) -> None:
    (system / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    root = system / "cgroup" / ("memory" if version == 1 else "")
    limit(root / "slurm/job_7", str(8 * GB), 5 * GB, 3 * GB, version)
    limit(root / "slurm/job_7/step_0", "max" if version == 2 else str(2**63 - 4096), 5 * GB, 0, version)
    assert found(system) == 6 * GB


@pytest.mark.parametrize(("name", "used", "left"), [("/kubepods/pod1/box", GB, 3 * GB), ("/", 5 * GB, 0)])
def test_in_a_container_the_group_has_the_place_of_the_root(name: str, used: int, left: int, system: Path) -> None:
    (system / "proc/self/cgroup").write_text(f"0::{name}\n")
    limit(system / "cgroup", str(4 * GB), used, 0, 2)
    assert found(system) == left


WORK = """
import os, signal, time
from pathlib import Path
from data_prep.common.workers import open_workers
if __name__ == "__main__":
    with open_workers(2, "json") as workers:
        list(workers.run(time.sleep, [0.05] * 8))
        os.killpg(0, signal.SIGKILL)
"""


def test_workers_run_no_module_of_the_current_folder(tmp_path: Path) -> None:
    """`python -c` looks there first, and others may write there. Killed all at once, they say nothing."""
    program, here = tmp_path / "work.py", tmp_path / "here"
    program.write_text(WORK)
    (here / "multiprocessing").mkdir(parents=True)
    (here / "multiprocessing" / "__init__.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    command, environment = [sys.executable, str(program)], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = Popen(command, cwd=here, env=environment, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    assert (process.communicate(timeout=60), process.returncode) == (("", ""), -signal.SIGKILL)
    assert not (tmp_path / "planted").exists()
