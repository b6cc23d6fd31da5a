"""Sets up the process before PyTorch is loaded, which reads these settings only once: call `prepare_process` first."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import psutil

from data_prep.common.errors import printable
from data_prep.common.supervision import outlive_mpirun

SPINS_ALONE, SPINS_AMONG_OTHERS = "1000000", "2000"
"""How often a thread of GNU OpenMP looks whether the others are there, before it gives up its core: many times, some
ten milliseconds, or few. Waking it takes as long as a small product; but where another program wants a core, threads
burn the one that the thread they wait for needs. Measured on 2 cores, a step of mini on 32 short sentences: 48 ms with
many looks and 104 with few; with another program on one of the cores 600 and 102. A later AMD EPYC (Zen 5) hardly minds
when it is alone (30 ms with few, 29 with many), and a count between is worse than both beside another program:
see benchmarks/NOTES.md. In pre-training, whose steps are large and whose runs are long, many looks are worth 3%."""
LOOK_SECONDS, BUSY = 0.1, 30
"""For how long cores are watched, and the percentage of that time for which one is at work that is not ours alone."""
ROOT = Path(__file__).parents[2]
_with_place = warnings.formatwarning

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable for the allocator of a GPU's memory, and its older name, which PyTorch prefers where both are set."""
GROWING = "expandable_segments:True"
"""Segments that grow. Every micro-batch has its own number of pieces, so a block that one has left fits the next one
badly, and segments of fixed sizes fill with gaps."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
NEVER, PAD = -1, 1 << 26
HUGE_PAGE, MADV_HUGEPAGE = 1 << 21, 14  # the latter of mman.h
MOST_HEAP, LEAST_LIMIT = 1 << 34, 1 << 31
PAGES = Path("/sys/kernel/mm/transparent_hugepage")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
"""Says with a 2 that memory counts as taken when it is asked for."""


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
    warnings.formatwarning = _format_warning
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, PAD)):
        ctypes.CDLL(None).mallopt(option, value)
    _ask_for_huge_pages()


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a warning of this project in one line, as commands print theirs, and one of a library with its place."""
    ours = Path(filename).is_relative_to(ROOT) and not Path(filename).is_relative_to(sys.prefix)
    return f"warning: {printable(str(message))}\n" if ours else _with_place(message, category, filename, lineno, line)


def _gives_huge_pages() -> bool:
    """Whether Linux gives pages of 2 MiB to those that ask, and glibc's malloc is the one that is asked."""
    if {"LD_PRELOAD", "MALLOC_PERTURB_"} & {*os.environ}:
        return False
    with suppress(OSError, ValueError):
        modes, size = (PAGES / name for name in ("enabled", "hpage_pmd_size"))
        return "[madvise]" in modes.read_text() and int(size.read_text()) == HUGE_PAGE
    return False


def _address_space_is_free() -> bool:
    """Whether memory counts only once it is written. Else a process that asks for much takes it from others."""
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    with suppress(OSError):
        return OVERCOMMIT.read_text().strip() != "2" and limits == [resource.RLIM_INFINITY] * 2
    return False


def _ask_for_huge_pages() -> None:
    """Lets the next bytes of the heap, half of the machine's memory, lie on huge pages: looking up where small ones lie
    takes 5 to 10% of a step (base, on 2 cores with AMX). The heap grows by them, and Linux is told of it. It gives
    memory when that is first written; `calloc` writes all of its own at once, since the heap is not new to it any
    more."""
    if not (_gives_huge_pages() and _address_space_is_free()):
        return
    size = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, MOST_HEAP)
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = libc.malloc(size)
    if begin is None:  # more than Linux gives
        return
    aligned = -(-begin // HUGE_PAGE) * HUGE_PAGE
    libc.madvise(aligned, begin + size - aligned, MADV_HUGEPAGE)
    libc.free(begin)


class HeapLimit:
    """Gives freed memory back to Linux where the heap has grown to twice what a step needs.

    Every micro-batch has its own number of pieces, so a block that one has left fits the next one badly, and small
    blocks that stay, such as what oneDNN remembers of a product, divide the rest: left to right, a mini with 128
    pieces reached 11 GB, of which a step needs less than 1.
    """

    def __init__(self) -> None:
        self._most: int | None = None

    def after_step(self) -> None:
        """Gives free memory back if the process holds too much. A step is taken to need what the process holds after
        the first step, or after the first one since memory was last given back."""
        held = read_own_memory()
        if self._most is None:
            self._most = max(LEAST_LIMIT, 2 * held)
        elif held > self._most:
            self._most = None
            ctypes.CDLL(None).malloc_trim(0)
            _ask_for_huge_pages()


def read_own_memory() -> int:
    """Reads how many bytes of memory this process has for itself, without files that it maps."""
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


def begin_rank(small_steps: bool = False) -> None:
    """Prepares a rank, which outlives mpirun; call it before PyTorch is loaded, which starts threads."""
    prepare_process(small_steps)
    outlive_mpirun()


def cores_are_idle() -> bool:
    """Whether nobody works on the cores that this process may use; False where that cannot be seen."""
    with suppress(OSError, IndexError):  # psutil's list has no core that is switched off
        busy = psutil.cpu_percent(LOOK_SECONDS, percpu=True)
        return all(busy[core] < BUSY for core in os.sched_getaffinity(0))
    return False
