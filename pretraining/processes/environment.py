"""Sets up the process before PyTorch is loaded, which reads these settings only once: call `prepare_process` first."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
import warnings
from pathlib import Path

SPINS_ALONE, SPINS_AMONG_OTHERS = "1000000", "2000"
"""How often a thread of GNU OpenMP looks whether the others are there, before it gives up its core: many times, some
ten milliseconds, or few. Waking it takes as long as a small product; but where another program wants a core, threads
burn the one that the thread they wait for needs. Measured on 2 cores, a step of mini on 32 short sentences: 48 ms with
many looks and 104 with few; with another program on one of the cores 600 and 102. In pre-training, whose steps are
large and whose runs are long, many looks are worth 3%."""
LOOK_SECONDS, BUSY = 0.1, 0.3
"""For how long cores are watched, and the share of that time in which one is at work that is not ours alone."""
STAT = Path("/proc/stat")

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable for the allocator of a GPU's memory, and its older name, which PyTorch prefers where both are set."""
GROWING = "expandable_segments:True"
"""Segments that grow. Every micro-batch has its own number of pieces, so a block that one has left fits the next one
badly, and segments of fixed sizes fill with gaps."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
NEVER, PAD = -1, 1 << 26


def prepare_process(small_steps: bool = False) -> None:
    """Makes threads wait without burning cores that others want, and malloc keep freed memory: giving it back and
    asking anew for each tensor costs a page fault every 4 KiB (measured at base size: 10 to 25% of a step). On a GPU,
    segments grow. A command with `small_steps` looks whether its cores are its own when it begins."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPINS_ALONE if small_steps and cores_are_idle() else SPINS_AMONG_OTHERS
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns of what the user cannot change
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = GROWING
    warnings.filterwarnings("ignore", message="`torch.distributed.", category=FutureWarning)  # DeepSpeed's calls
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD)):
        mallopt(option, value)


def allow_open_files(count: int) -> tuple[int, int]:
    """Lets this process have so many files and connections open, as far as the system permits it: many give 1,024 to
    begin with, and more to whoever asks. Returns how many it might have before, and how many it may now."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before == resource.RLIM_INFINITY or before >= count:
        return _as_count(before), _as_count(before)
    allowed = count if most == resource.RLIM_INFINITY else min(count, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    return before, allowed


def _as_count(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def cores_are_idle() -> bool:
    """Whether nobody works on the cores that this process may use; False where that cannot be seen."""
    try:
        before = _seconds_of_cores()
        time.sleep(LOOK_SECONDS)
        after = _seconds_of_cores()
    except (OSError, ValueError, AttributeError):
        return False
    return bool(before) and all(after[core] - seconds < BUSY * LOOK_SECONDS for core, seconds in before.items())


def _seconds_of_cores() -> dict[int, float]:
    """For how long each core that this process may use was at work since the machine has started."""
    found = {}
    for line in STAT.read_text().splitlines():
        name, *ticks = line.split()
        if name.removeprefix("cpu").isdecimal():
            user, nice, system, _idle, _waiting, *interrupts = map(int, ticks[:8])
            found[int(name.removeprefix("cpu"))] = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return {core: found[core] for core in os.sched_getaffinity(0) if core in found}
