"""Compiles our kernels for GPUs that need not be here: python -m support.triton_compiler 90."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pretraining.model import gpu_cross_entropy, gpu_row_keys
from pretraining.model import gpu_kernels as kernels
from pretraining.model.gpu_operations import USUAL_WORDS

HIDDEN = 768
KEYS = {"sequences": "*i64", "positions": "*i64", "starts": "*i32", "keys": "*i32"}
TYPES = {
    **dict.fromkeys(("rows", "block", "count", "site", "threshold", "vocabulary"), "i32"),
    **dict.fromkeys(("scale_kept", "epsilon"), "fp32"),
    **dict.fromkeys(("means", "scales", "sums", "losses"), "*fp32"),
    "labels": "*i64",
    "right": "*i8",
    **KEYS,
}
"""Of arguments; all others are the model's numbers."""


def compiled(kernel: Any, tile: kernels.Tile, capability: int, numbers: str = "*fp16") -> bytes:
    """The machine code of a kernel for these numbers, with dropout."""
    sizes = {"width": tile.width, "tile_rows": tile.rows, "tile_columns": tile.columns}
    constants = {**sizes, "drops": True, "slopes": True, "chunk": gpu_cross_entropy.CHUNK, "tile": gpu_row_keys.PIECES}
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, numbers) for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name].startswith("*")}
    given = {(at,): constants[name] for at, name in enumerate(names) if name in constants}
    source = ASTSource(kernel, types, given, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": tile.warps})
    code: bytes = made.asm["cubin"]
    return code


def spills(code: bytes) -> int:
    """The bytes of a thread's numbers for which registers do not suffice."""
    tool = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"STACK:(\d+)", told)))


def main(capability: int) -> None:
    """Compiles all kernels and says how many there are, and what their threads spill."""
    wide, rows = kernels.Tile.of(4 * HIDDEN, kernels.GELU_COLUMNS), kernels.Tile.of(HIDDEN)
    sums = kernels.Tile.of(3 * HIDDEN, kernels.SUM_COLUMNS)
    tiles = {
        **dict.fromkeys((kernels._gelu_forward, kernels._gelu_backward, kernels._dropout), wide),
        **dict.fromkeys((gpu_row_keys._row_keys, kernels._join), wide),
        **dict.fromkeys((kernels._norm_forward, kernels._norm_backward), rows),
        kernels._sum_blocks: sums,
    }
    found = [spills(compiled(kernel, tile, capability)) for kernel, tile in tiles.items()]
    words = kernels.Tile(USUAL_WORDS, 1, 1, 8)
    found.append(spills(compiled(gpu_cross_entropy._cross_entropy, words, capability, "*bf16")))
    print(f"{len(found)} kernels, {sum(found)} spills")


if __name__ == "__main__":
    main(int(sys.argv[1]))
