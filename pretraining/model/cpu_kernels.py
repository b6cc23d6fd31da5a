"""Builds and calls the fused CPU operations in the folder kernels/.

The source is compiled for the processor of this machine at the first use (about two seconds), and kept. Without a C++
compiler, a warning is printed and PyTorch's operations are used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.common.private_folders import cache_home, open_private, require_private, tell_refusal, temporary_home

SOURCES = Path(__file__).with_name("kernels")
MAIN_SOURCE = SOURCES / "cpu_kernels.cpp"
FLAGS = (
    "-O3 -std=c++17 -fPIC -fopenmp "
    # sums may be reordered and divisions become multiplications, but NaN and infinity stay what they are
    "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -freciprocal-math"
).split()
CHECKSUM_SIZE = hashlib.sha256().digest_size
Masks = tuple[Tensor, int, float]
"""The arguments of the kernels for dropout: keys of rows, site, probability."""
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Kernel(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p))


_allowed = True


def allow(allowed: bool) -> None:
    """Allows or forbids kernels of our own in this process, also those for GPUs; PyTorch's operations replace them."""
    global _allowed
    _allowed = allowed


def may_use_kernels() -> bool:
    """Whether kernels of our own may be used here, on any device."""
    return _allowed


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can compute on this tensor; never under autocast, which mixes types."""
    if not (tensor.is_cpu and _allowed) or torch.is_autocast_enabled("cpu"):
        return False
    return tensor.dtype in TYPES and bool(_functions())


@functools.cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles (AMX), the compiler knows them, and Linux lets this process use them."""
    return "attention_by_tiles_bfloat16" in _functions() and bool(torch.cpu._init_amx())


def small_products() -> str | None:
    """Names how the kernels multiply small matrices of bf16: by "tiles", or by "lanes" of vectors of 512 bits; None
    where the processor or the compiler supports neither."""
    if has_tiles():
        return "tiles"
    return "lanes" if "attention_by_lanes_bfloat16" in _functions() else None


def describe_arithmetic() -> str:
    """Names how this process computes on its CPU. Results under another name differ by rounding, and those of "no
    kernels" also by the masks of dropout."""
    return (small_products() or "vectors") if may_use_kernels() and _functions() else "no kernels"


def vector_bits() -> int:
    """Returns the width of the vectors that the kernels were compiled for; 0 without kernels."""
    if not (may_use_kernels() and _functions()):
        return 0
    return next((bits for bits in (512, 256) if f"vectors_of_{bits}" in _functions()), 128)


def has_kernel(name: str) -> bool:
    """Whether a kernel of this name exists for fp32 on this processor."""
    return f"{name}_{TYPES[torch.float32]}" in _functions()


def call(name: str, first: Tensor, *arguments: Any) -> None:
    """Runs a kernel for the type of its first tensor; integers are passed as int64, floats as double."""
    function = _functions()[f"{name}_{TYPES[first.dtype]}"]
    function(*map(_to_ctypes, (first, *arguments)), ctypes.c_int64(torch.get_num_threads()))


def _to_ctypes(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return None if argument is None else ctypes.c_int64(argument)


def find_compiler() -> str | None:
    """Finds the C++ compiler of this machine, which may have arguments (`CXX="g++ -march=x86-64-v3"`); None if there is
    none."""
    return os.environ.get("CXX", "").strip() or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


@functools.cache
def _functions() -> dict[str, Any]:
    """Loads the kernels by name; none where they cannot be built."""
    if (compiler := find_compiler()) is None:
        warnings.warn("no C++ compiler: training on the CPU will be slow (install g++)", stacklevel=2)
        return {}
    try:
        library = _load_library(compiler)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error).encode(errors="replace")
        reason = said.decode(errors="replace").strip()[-500:]
        warnings.warn(f"no kernels could be built: training on the CPU will be slow: {reason}", stacklevel=2)
        return {}
    table = ctypes.pointer(_Kernel.in_dll(library, "kernels"))
    kernels = itertools.takewhile(lambda kernel: kernel.name, (table[index] for index in itertools.count()))
    return {kernel.name.decode(): ctypes.CFUNCTYPE(None)(kernel.function) for kernel in kernels}


def _load_library(compiler: str) -> ctypes.CDLL:
    """Loads the library from the cache of this user, or where that fails from a folder beside temporary files."""
    name = _name_library(compiler)
    try:
        return _load_from(cache_home() / "cloze", name, compiler)
    except OSError as error:  # a home that is missing, full, another user's, not writable or not executable
        folder = temporary_home() / f"cloze-{os.geteuid()}"
        tell_refusal(f"{error}; the kernels for CPUs are kept in {folder}")
        return _load_from(folder, name, compiler)


def _load_from(folder: Path, name: str, compiler: str) -> ctypes.CDLL:
    """Loads a library from a folder that is this user's alone; builds it where it is missing or damaged."""
    library = open_private(folder) / name
    if not _is_whole(library):
        _install(compiler, library)
    return ctypes.CDLL(str(library))


def _split_command(compiler: str) -> list[str]:
    """Splits a command into program and arguments, as a shell would."""
    return [compiler] if shutil.which(compiler) else shlex.split(compiler)


def _name_library(compiler: str) -> str:
    """Names the library by a hash of all that its content depends on."""
    words = _split_command(compiler)
    parts = [
        *(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]*"))),
        " ".join((*words[1:], *_list_flags(words))).encode(),
        subprocess.run([*words, "--version"], capture_output=True, check=True).stdout,
        _read_processor().encode(),
    ]
    return f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _is_whole(library: Path) -> bool:
    """Whether a library exists and is whole; raises PermissionError if others could have written it. A truncated
    library would end the process with a bus error."""
    if not library.exists():
        return False
    require_private(library)
    content = library.read_bytes()
    return hashlib.sha256(content[:-CHECKSUM_SIZE]).digest() == content[-CHECKSUM_SIZE:]


def _install(compiler: str, library: Path) -> None:
    """Builds a library with its checksum at the end, and renames it into place: ranks may build at the same time, and a
    crash leaves no part of it. The compiler writes to temporary files: in a full home it would only fail, with no
    OSError here."""
    with tempfile.TemporaryDirectory(prefix="cloze-", dir=temporary_home()) as work:
        content = _build(compiler, Path(work)).read_bytes()
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        whole = Path(work) / library.name
        with whole.open("wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        whole.chmod(0o700)
        whole.replace(library)


def _build(compiler: str, work: Path) -> Path:
    """Compiles and links separately: linking with -fopenmp would load a second OpenMP beside that of PyTorch. The
    compiler's own temporary files go to `work` too, where other users cannot write."""
    words, compiled, library = _split_command(compiler), work / "kernels.o", work / "kernels.so"
    compiling, own = [*_list_flags(words), "-c", str(MAIN_SOURCE), "-o", str(compiled)], {"TMPDIR": str(work)}
    for step in (compiling, ["-shared", str(compiled), "-o", str(library)]):
        subprocess.run([*words, *step], capture_output=True, check=True, env={**os.environ, **own})
    return library


def _list_flags(words: list[str]) -> list[str]:
    """Lists the flags of the compiler: for the processor of this machine, unless its own arguments name one."""
    width = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return [*FLAGS, *width, *([] if any(word.startswith("-march=") for word in words) else ["-march=native"])]


def _read_processor() -> str:
    """Reads what -march=native depends on: machines with different processors may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
