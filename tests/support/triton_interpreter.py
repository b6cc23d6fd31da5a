"""Triton's interpreter, which runs kernels in Python: rounding as GPUs do it, and what kernels read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from data_prep.common.arrays import Array
from pretraining.model import gpu_kernels

CONVERT = interpreter._convert_float
LOAD, STORE = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store
MULTIPLY = interpreter.InterpreterBuilder.create_dot
LAUNCH = gpu_kernels._launch


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

    with (
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", multiply),
    ):
        yield


class Traffic:
    """Counts what kernels read and write while it is entered, in bytes.

    What a launch reads again, such as a bias for other rows, counts once: it is in the GPU's cache.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.again = 0
        """the most places of a launch that were read more than once"""
        self._read: list[Array] = []
        self._written: list[Array] = []

    def __enter__(self) -> Traffic:
        doubles = {
            "create_masked_load": lambda *given: self._noted(self._read, LOAD, *given[:2], given[2], *given[2:]),
            "create_masked_store": lambda *given: self._noted(self._written, STORE, *given[:2], given[3], *given[2:]),
        }
        self._patches = [mock.patch.object(interpreter.InterpreterBuilder, *double) for double in doubles.items()]
        self._patches.append(mock.patch.object(gpu_kernels, "_launch", self._launched))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _noted(self, notes: list[Array], operation: Any, builder: Any, places: Any, mask: Any, *more: Any) -> Any:
        size = places.get_element_ty().primitive_bitwidth // 8
        chosen = places.data[np.broadcast_to(mask.data, places.data.shape).astype(bool)]
        notes.append(np.stack([chosen, np.full_like(chosen, size)], 1))
        return operation(builder, places, *more)

    def _launched(self, *arguments: Any, **constants: Any) -> None:
        self._read, self._written = [], []
        LAUNCH(*arguments, **constants)
        for notes in (self._read, self._written):
            places, times = np.unique(np.concatenate(notes), axis=0, return_counts=True)
            self.bytes += int(places[:, 1].sum())
            assert notes is self._read or times.max() == 1, "a place is written twice"
            self.again = max(self.again, int((times > 1).sum()))
