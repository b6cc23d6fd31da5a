"""What a process is given before PyTorch is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from pretraining.processes.environment import SPINS_ALONE, SPINS_AMONG_OTHERS, prepare_process

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_memory_of_a_gpu_comes_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    prepare_process()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")  # which prepare_process has set


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_of_the_allocator_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    prepare_process()
    assert {each: os.environ.get(each) for each in NAMES if each in os.environ} == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize(
    ("looks", "spins"),
    [((0, 0), SPINS_ALONE), ((0, 1_000_000), SPINS_AMONG_OTHERS), ((), SPINS_AMONG_OTHERS)],
    ids=["idle", "busy", "unseen"],
)
def test_threads_wait_long_only_where_nobody_else_works(
    looks: tuple[int, ...], spins: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    if looks:
        stat.write_text(lines(looks[0]))
        monkeypatch.setattr("time.sleep", lambda _: stat.write_text(lines(looks[1])))
    for small_steps, expected in ((True, spins), (False, SPINS_AMONG_OTHERS)):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        prepare_process(small_steps)
        assert os.environ["GOMP_SPINCOUNT"] == expected
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_process(small_steps=True)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


HEAP = """
import ctypes, resource, sys
from pathlib import Path
from pretraining.processes import environment
if "limited" in sys.argv:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
if "counted" in sys.argv:
    environment.OVERCOMMIT = Path("overcommit")
    environment.OVERCOMMIT.write_text("2\\n")
environment.prepare_process()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.memset(libc.malloc(1 << 26), 1, 1 << 26)
print(Path("/proc/self/status").read_text(), Path("/proc/self/smaps_rollup").read_text())
"""
"""A process that prepares itself, writes 64 MiB, and prints what Linux gave it."""


@pytest.mark.parametrize("words", [(), ("limited",), ("counted",)])
def test_the_heap_lies_on_huge_pages_where_nobody_pays_for_it(words: tuple[str, ...], tmp_path: Path) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("Linux gives huge pages to all, or to nobody")
    command, place = [sys.executable, "-c", HEAP, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, check=True).stdout
    found = {name: 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", said)[0]) for name in ("VmSize", "AnonHugePages")}
    assert (found["AnonHugePages"] > 1 << 25) is (not words)
    assert (found["VmSize"] > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2) is (not words)


def lines(ticks: int) -> str:
    """What /proc/stat says of cores that were at work for so long."""
    cores = "".join(f"cpu{core} {ticks} 0 0 500 0 0 0 0 0 0\n" for core in os.sched_getaffinity(0))
    return f"cpu 9 9 9 9 9 9 9 9 0 0\n{cores}intr 1\n"
