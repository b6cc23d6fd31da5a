"""Our kernels for GPUs that need not be here: Triton's interpreter runs them in Python, rounding as GPUs do, and counts
what they read and write; its compiler makes their machine code: python -m support.triton_kernels 90 bf16.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.backends.nvidia
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from data_prep.common.arrays import Array
from pretraining.model import gpu_attention, gpu_cross_entropy, gpu_halves, gpu_kernels, gpu_layouts, gpu_row_keys
from pretraining.model.gpu_operations import USUAL_WORDS
from pretraining.model.gpu_tiles import COLUMNS, SUM_COLUMNS, Tile

CONVERT, LAUNCH = interpreter._convert_float, gpu_kernels._launch
BUILDER = interpreter.InterpreterBuilder
LOAD, STORE, MULTIPLY = BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.create_dot


@contextmanager
def rounding_as_gpus_do() -> Iterator[None]:
    """To the nearest bfloat16, where the interpreter cuts off; it also multiplies the bits of such numbers."""

    def convert(numbers: Array, given: Any, wanted: Any, mode: Any) -> Array:
        if (given, wanted) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(numbers, np.float32)).bfloat16()
            bits: Array = rounded.view(torch.int16).numpy().view(np.uint16)
            return bits
        converted: Array = CONVERT(numbers, given, wanted, mode)
        return converted

    def widen(tensor: Any) -> Any:
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        numbers = torch.from_numpy(np.ascontiguousarray(tensor.data).view(np.int16)).view(torch.bfloat16)
        return interpreter.TensorHandle(numbers.float().numpy(), tl.float32)

    def multiply(builder: Any, one: Any, other: Any, *more: Any) -> Any:
        return MULTIPLY(builder, widen(one), widen(other), *more)

    with mock.patch.object(interpreter, "_convert_float", convert), mock.patch.object(BUILDER, "create_dot", multiply):
        yield


class Traffic:
    """What kernels read and write, in bytes. What a launch reads again, such as a bias for other rows, counts once: it
    is in the GPU's cache."""

    def __init__(self) -> None:
        self.bytes = 0
        self.again = 0
        """the most places of a launch that were read more than once"""

    @contextmanager
    def count(self) -> Iterator[None]:
        """Counts within this, and refuses launches that write a place twice."""
        read: list[Array] = []
        written: list[Array] = []

        def note(notes: list[Array], places: Any, mask: Any) -> None:
            chosen = places.data[np.broadcast_to(mask.data, places.data.shape).astype(bool)]
            notes.append(np.stack([chosen, np.full_like(chosen, places.get_element_ty().primitive_bitwidth // 8)], 1))

        def load(builder: Any, places: Any, mask: Any, *more: Any) -> Any:
            note(read, places, mask)
            return LOAD(builder, places, mask, *more)

        def store(builder: Any, places: Any, values: Any, mask: Any, *more: Any) -> Any:
            note(written, places, mask)
            return STORE(builder, places, values, mask, *more)

        def launch(*arguments: Any, **constants: Any) -> None:
            del read[:], written[:]
            LAUNCH(*arguments, **constants)
            for notes in (read, written):
                places, times = np.unique(np.concatenate(notes), axis=0, return_counts=True)
                self.bytes += int(places[:, 1].sum())
                assert notes is read or times.max() == 1, "a place is written twice"
                self.again = max(self.again, int((times > 1).sum()))

        with (
            mock.patch.object(BUILDER, "create_masked_load", load),
            mock.patch.object(BUILDER, "create_masked_store", store),
            mock.patch.object(gpu_kernels, "_launch", launch),
        ):
            yield


HEAD = 64
"""the width of a head"""
UNUSED = {
    (gpu_kernels._norm_forward, False): ["total"],
    (gpu_kernels._norm_backward, False): ["past"],
    (gpu_kernels._norm_backward, True): ["bias", "residual"],
}
"""The tensors that a kernel is not given, in its usual form or in another."""
TYPES = {
    "i32": "rows block count site threshold vocabulary pieces blocks first window first_head",
    "fp32": "scale slope_scale scale_kept epsilon direction",
    "*fp32": "means scales sums losses turns spreads halfway",
    "*i64": "labels sequences positions",
    "*i32": "starts keys hashes",
    "*i8": "right",
}
"""Of arguments; all others are the model's numbers."""


def compiled(
    kernel: Any, tile: Tile, capability: int, numbers: str, drops: bool = True, another: bool = False, size: int = HEAD
) -> bytes:
    """The machine code of a kernel for these numbers; `another`: for gelu by tanh, a norm whose sum goes on, or
    attention over several tiles of keys."""
    sizes = {"width": tile.width, "tile_rows": tile.rows, "tile_columns": tile.columns}
    constants: dict[str, Any] = {
        **sizes,
        "drops": drops,
        "slopes": True,
        **({} if drops else dict.fromkeys(("keys", "hashes"))),
    }
    constants |= {"chunk": gpu_cross_entropy.CHUNK, "tile": gpu_row_keys.PIECES, "half": HEAD // 2}
    constants |= {"size": size, "adds_up": True, "whole": True, **dict.fromkeys(("tanh", "chains", "halts"), another)}
    constants |= {**dict.fromkeys(UNUSED.get((kernel, another), []))}
    known = {name: kind for kind, names in TYPES.items() for name in names.split()}
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else known.get(name, numbers) for name in names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name].startswith("*")}
    given = {(at,): constants[name] for at, name in enumerate(names) if name in constants}
    source, target = ASTSource(kernel, types, given, aligned), GPUTarget("cuda", capability, 32)
    code: bytes = triton.compile(
        source, target=target, options={"num_warps": tile.warps, "num_stages": tile.stages}
    ).asm["cubin"]
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
        yield gpu_kernels._gelu_forward, Tile.from_gelu_width(inner), True, another
        yield gpu_kernels._gelu_backward, Tile.from_gelu_width(inner), True, another
    for drops, another in product((True, False), repeat=2):
        yield gpu_kernels._norm_forward, Tile.from_norm_width(width), drops, another
        yield gpu_kernels._norm_backward, Tile.from_norm_width(width, backward=True), drops, another
    for kernel in (gpu_halves._geglu_forward, gpu_halves._geglu_backward):
        yield kernel, Tile.from_gelu_width(4 * width), True
    for kernel in (gpu_kernels._dropout, gpu_kernels._join, gpu_halves._rotate):
        yield kernel, Tile.from_width(width, COLUMNS), True
    for parts in (3, 4):  # of norms and joined gradients, and of GELU
        yield gpu_kernels._sum_blocks, Tile.from_width(parts * width, SUM_COLUMNS), True


def main(capability: int, numbers: str) -> None:
    """Compiles all kernels and says how many there are, and what their threads spill."""
    chosen: list[tuple[Any, ...]] = [case for width in (256, 768, 1024) for case in cases(width)]  # mini, base, large
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
