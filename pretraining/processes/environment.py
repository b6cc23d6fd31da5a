"""Sets up the process before PyTorch is loaded, which reads these settings only once: call `prepare_process` first."""

from __future__ import annotations

import ctypes
import os
import warnings

SPINS = "2000"
"""How often a thread of GNU OpenMP looks whether the others are there, before it gives up its core. With more, threads
burn the core that the one they wait for needs. Measured on 2 cores with another program on one of them: 12 times slower
with OpenMP's own value; with nothing else running, 3% faster."""

PRODUCTS = "64"
"""For how many sizes of matrix products oneDNN keeps code and buffers. Every micro-batch has its own number of pieces,
so it meets many. Measured at mini size after 40 steps: 2.2 GB with oneDNN's own 1,024, 1.7 GB with 64, and no slower.
"""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable for the allocator of a GPU's memory, and its older name, which PyTorch prefers where both are set."""
GROWING = "expandable_segments:True"
"""Segments that grow. Every micro-batch has its own number of pieces, so a block that one has left fits the next one
badly, and segments of fixed sizes fill with gaps."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
NEVER, PAD = -1, 1 << 26


def prepare_process() -> None:
    """Makes threads wait without burning cores, and malloc keep freed memory: giving it back and asking anew for each
    tensor costs a page fault every 4 KiB (measured at base size: 10 to 25% of a step). On a GPU, segments grow."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRODUCTS)
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
