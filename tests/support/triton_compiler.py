"""Compiles our kernels for GPUs that need not be here: python -m support.triton_compiler 90 bf16."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pretraining.model import gpu_attention, gpu_cross_entropy, gpu_halves, gpu_layouts, gpu_row_keys
from pretraining.model import gpu_kernels as kernels
from pretraining.model.gpu_operations import USUAL_WORDS
from pretraining.model.gpu_tiles import COLUMNS, SUM_COLUMNS, Tile

WIDTHS = (256, 768, 1024)
"""of mini, base and large"""
HEAD = 64
"""the width of a head"""
UNUSED = {
    (kernels._norm_forward, False): ["total"],
    (kernels._norm_backward, False): ["past"],
    (kernels._norm_backward, True): ["bias", "residual"],
    (gpu_attention._attend_backward, False): ["halfway"],
}
"""The tensors that a kernel is not given, in its usual form or in another."""
KEYS = {"sequences": "*i64", "positions": "*i64", "starts": "*i32", "keys": "*i32"}
TYPES = {
    **dict.fromkeys(("rows", "block", "count", "site", "threshold", "vocabulary"), "i32"),
    **dict.fromkeys(("pieces", "blocks", "first", "window", "first_head"), "i32"),
    **dict.fromkeys(("scale", "slope_scale", "scale_kept", "epsilon", "direction"), "fp32"),
    **dict.fromkeys(("means", "scales", "sums", "losses", "turns", "spreads", "halfway"), "*fp32"),
    "labels": "*i64",
    "right": "*i8",
    **KEYS,
}
"""Of arguments; all others are the model's numbers."""


def compiled(
    kernel: Any,
    tile: Tile,
    capability: int,
    numbers: str,
    drops: bool = True,
    another: bool = False,
    size: int = HEAD,
) -> bytes:
    """The machine code of a kernel for these numbers; `another`: for gelu by tanh, a norm whose sum goes on, or
    attention over several tiles of keys."""
    sizes = {"width": tile.width, "tile_rows": tile.rows, "tile_columns": tile.columns}
    constants: dict[str, Any] = {**sizes, "drops": drops, "slopes": True, **({} if drops else {"keys": None})}
    constants |= {"chunk": gpu_cross_entropy.CHUNK, "tile": gpu_row_keys.PIECES, "half": HEAD // 2}
    constants |= {"size": size, "adds_up": True, **dict.fromkeys(("tanh", "chains", "halts"), another)}
    constants |= {**dict.fromkeys(UNUSED.get((kernel, another), []))}
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


def cases(width: int) -> Iterator[tuple[Any, ...]]:
    """The kernels that a model of this width calls, with their tiles, whether they drop something, and whether they
    take another form."""
    for inner, another in ((width, False), (4 * width, False), (4 * width, True)):  # of the head and of layers
        yield kernels._gelu_forward, Tile.from_gelu_width(inner), True, another
        yield kernels._gelu_backward, Tile.from_gelu_width(inner), True, another
    for drops, another in product((True, False), repeat=2):
        yield kernels._norm_forward, Tile.from_norm_width(width), drops, another
        yield kernels._norm_backward, Tile.from_norm_width(width, backward=True), drops, another
    for kernel in (gpu_halves._geglu_forward, gpu_halves._geglu_backward):
        yield kernel, Tile.from_gelu_width(4 * width), True
    for kernel in (kernels._dropout, kernels._join, gpu_halves._rotate):
        yield kernel, Tile.from_width(width, COLUMNS), True
    for parts in (3, 4):  # of norms and joined gradients, and of GELU
        yield kernels._sum_blocks, Tile.from_width(parts * width, SUM_COLUMNS), True


def main(capability: int, numbers: str) -> None:
    """Compiles all kernels and says how many there are, and what their threads spill."""
    chosen: list[tuple[Any, ...]] = [case for width in WIDTHS for case in cases(width)]
    chosen.append((gpu_row_keys._row_keys, Tile(1, 1, 1, 4), True))
    if numbers != "fp32" and capability >= 80:  # where it is used
        for size, longest, drops in product(gpu_layouts.OWN_SIZES, (64, 512), (True, False)):
            tiles = [gpu_attention.choose_tile(1024, size, longest, of) for of in (None, divmod(capability, 10))]
            chosen.append((gpu_attention._attend, tiles[0], drops, False, size))
            chosen.append((gpu_attention._attend_backward, tiles[1], drops, longest > tiles[1].columns, size))
    if numbers != "fp16":  # in which losses are computed by PyTorch
        chosen.append((gpu_cross_entropy._cross_entropy, Tile(USUAL_WORDS, 1, 1, 8), True))
    found = [spills(compiled(kernel, tile, capability, f"*{numbers}", *form)) for kernel, tile, *form in chosen]
    print(f"{len(found)} kernels, {sum(found)} spills")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
