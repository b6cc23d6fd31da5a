"""What a process is given before PyTorch is loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from conftest import ROOT

from pretraining.processes import environment
from pretraining.processes.environment import SPINS_ALONE, SPINS_AMONG_OTHERS, prepare_process

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("chosen", [None, *NAMES])
def test_memory_of_a_gpu_comes_in_segments_that_grow(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # what prepare_process sets is taken back
        monkeypatch.delenv(name)
    if chosen is not None:
        monkeypatch.setenv(chosen, "max_split_size_mb:128")
    prepare_process()
    wanted = {NAMES[0]: "expandable_segments:True"} if chosen is None else {chosen: "max_split_size_mb:128"}
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == wanted


@pytest.mark.parametrize(
    ("busy", "spins"), [(0.0, SPINS_ALONE), (99.0, SPINS_AMONG_OTHERS), (OSError, SPINS_AMONG_OTHERS)]
)
def test_threads_wait_long_only_where_nobody_else_works(busy: Any, spins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`busy` is the percentage of each core, or why nobody can tell."""
    own = os.sched_getaffinity(0)  # others may work on all but these
    seen: dict[str, Any] = {"return_value": [busy if core in own else 99.0 for core in range(4096)]}
    monkeypatch.setattr(psutil, "cpu_percent", Mock(**(seen if busy is not OSError else {"side_effect": busy})))
    for small_steps, expected in ((True, spins), (False, SPINS_AMONG_OTHERS)):
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        prepare_process(small_steps)
        assert os.environ["GOMP_SPINCOUNT"] == expected
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_process(small_steps=True)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def run_python(program: str, *words: str, **variables: str) -> str:
    command, variables = [sys.executable, "-c", program, *words], {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


HEAP = """
import ctypes, resource, sys
from pathlib import Path
from pretraining.processes import environment
if "limited" in sys.argv:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
if "counted" in sys.argv:
    environment.OVERCOMMIT = Path(sys.argv[-1])
environment.prepare_process()
print(Path("/proc/self/smaps").read_text())
"""
"""A process that prepares itself, and prints what Linux knows of its memory."""


@pytest.mark.parametrize("words", ["", "limited", "counted", "preloaded"])
def test_the_heap_asks_for_huge_pages_where_nobody_pays_for_it(words: str, tmp_path: Path) -> None:
    if not (environment._gives_huge_pages() and environment._address_space_is_free()):
        pytest.skip("Linux gives huge pages to all or to nobody, or counts memory that is not written")
    (tmp_path / "overcommit").write_text("2\n")
    said = run_python(HEAP, words, str(tmp_path / "overcommit"), **({"LD_PRELOAD": ""} if words == "preloaded" else {}))
    asked = [part for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", said, flags=re.MULTILINE) if " hg" in part]
    sizes = [int(re.findall(r"^Size: +(\d+) kB", part, re.MULTILINE)[0]) << 10 for part in asked]
    assert (sum(sizes) > 1 << 30) is (not words), asked


GROWN = """
import numpy as np
from pretraining.processes import environment
environment.prepare_process()
environment.LEAST_LIMIT = 1 << 26
limit, held = environment.HeapLimit(), [environment.read_own_memory()]
limit.after_step()
blocks = [np.ones(12_000) for _ in range(2_500)]  # 240 MB
del blocks[1::2]
held.append(environment.read_own_memory())
limit.after_step()
held.append(environment.read_own_memory())
print(*held, float(np.sum(blocks[-1])))
"""
"""A process whose heap has grown to more than twice what it had, and half of which is free, between blocks in use."""


def test_a_heap_that_has_grown_gives_back_what_is_free() -> None:
    first, grown, after, last = map(float, run_python(GROWN).split())
    assert grown - first > 220e6
    assert grown - after > 95e6
    assert last == 12_000
