"""A machine gets as many workers as it has cores, and no more than it has memory for."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.common.capacity import available_memory, room_for_workers

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "available", "workers"), [(8, 64 * GB, 8), (64, 4 * GB, 10), (8, GB, 1), (8, 0, 1), (1, 0, 1)]
)
def test_memory_limits_the_workers(cores: int, available: int, workers: int) -> None:
    found, said = room_for_workers(cores=cores, available=available)
    assert found == workers
    assert bool(said) == (workers < cores)


def test_fewer_workers_than_cores_are_told_with_the_cure() -> None:
    _, said = room_for_workers(cores=64, available=4 * GB)
    assert said == (
        "10 workers for 64 cores: 4.0 GB of memory are available, and each may need 0.3 GB (--workers N overrides that)"
    )


def test_what_the_machine_has_is_found() -> None:
    available = available_memory()
    assert available is not None
    assert 0 < available < 1 << 50


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine with 16 GB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  32000000 kB\nMemAvailable: 15625000 kB\n")
    return tmp_path


def limit(folder: Path, most: str, used: int, cache: int, version: int) -> None:
    """Gives a group of processes a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{'' if version == 2 else 'total_'}inactive_file {cache}\n")


def found(system: Path) -> int | None:
    return available_memory(system / "proc", system / "cgroup")


def test_without_groups_the_machine_counts(system: Path) -> None:
    assert found(system) == 16 * GB


@pytest.mark.parametrize(
    ("version", "line"), [(2, "0::/slurm/job_7/step_0"), (1, "5:cpuset,memory:/slurm/job_7/step_0")]
)
def test_the_tightest_group_counts_without_its_cache(version: int, line: str, system: Path) -> None:
    (system / "proc/self/cgroup").write_text(f"9:name=systemd:/x\n{line}\n")
    root = system / "cgroup" / ("memory" if version == 1 else "")
    limit(root / "slurm/job_7", str(8 * GB), 5 * GB, 3 * GB, version)
    limit(root / "slurm/job_7/step_0", "max" if version == 2 else str(2**63 - 4096), 5 * GB, 0, version)
    assert found(system) == 6 * GB


def test_in_a_container_the_group_has_the_place_of_the_root(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/kubepods/pod1/box\n")
    limit(system / "cgroup", str(4 * GB), GB, 0, 2)
    assert found(system) == 3 * GB


def test_a_group_above_its_limit_has_nothing_left(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/\n")
    limit(system / "cgroup", str(GB), 2 * GB, 0, 2)
    assert found(system) == 0


def test_a_system_that_says_nothing_gets_a_worker_for_each_core(tmp_path: Path) -> None:
    assert found(tmp_path) is None
