"""In which numbers a model computes, and what is refused where the device has it not."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import deterministic

from data_prep.common.errors import UserError
from pretraining import devices
from pretraining.config.settings import Compute, Precision
from pretraining.engine.precision import choose_dtype, set_arithmetic
from pretraining.model import cpu_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives back what holds for the whole process."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
    cpu_kernels.allow(True)


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "H200", (9, 0))


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    monkeypatch.setattr(devices, "has_triton", lambda: False)


def state() -> list[Any]:
    return [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), dict(os.environ)]


def test_older_gpus_compute_in_fp16(t4: None) -> None:
    assert choose_dtype("auto", GPU) == torch.float16
    with pytest.raises(UserError, match=r'precision.dtype = "bf16": Tesla T4 has none; take "fp16" or "auto"'):
        set_arithmetic(Precision(dtype="bf16"), Compute(), GPU)


def test_newer_gpus_compute_in_bf16(h200: None) -> None:
    assert choose_dtype("auto", GPU) == choose_dtype("bf16", GPU) == torch.bfloat16


def test_compiling_leaves_our_kernels_to_what_is_not_compiled() -> None:
    set_arithmetic(Precision(), Compute(compile=True), CPU)
    assert cpu_kernels.usable(torch.zeros(1))
    set_arithmetic(Precision(), Compute(kernels="torch"), CPU)
    assert not cpu_kernels.usable(torch.zeros(1))


def test_compiling_for_a_gpu_needs_triton(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"compute.compile = true: needs Triton[\s\S]*pip install triton"):
        set_arithmetic(Precision(), Compute(compile=True), GPU)
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    set_arithmetic(Precision(), Compute(compile=True), GPU)
    with pytest.raises(UserError, match=r'compute.kernels = "torch": not with compute.compile = true on a GPU'):
        set_arithmetic(Precision(), Compute(compile=True, kernels="torch"), GPU)


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "find_compiler", lambda: None)
    with pytest.raises(UserError, match=r"compute.compile = true: needs a C"):
        set_arithmetic(Precision(), Compute(compile=True), CPU)


def test_compiling_needs_the_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Debian's python3 comes without them, and what is compiled is loaded as a module of Python."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UserError, match=r"compute.compile = true: needs Python's headers[\s\S]*install python3-dev"):
        set_arithmetic(Precision(), Compute(compile=True), CPU)


def test_tf32_is_chosen_and_given_up_again(h200: None) -> None:
    set_arithmetic(Precision(dtype="fp32", tf32=True), Compute(), GPU)
    assert torch.get_float32_matmul_precision() == "high"
    set_arithmetic(Precision(dtype="fp32"), Compute(), GPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_tf32_is_refused_where_there_is_none(t4: None) -> None:
    with pytest.raises(UserError, match=r"precision.tf32 = true: Tesla T4 has none; take false"):
        set_arithmetic(Precision(dtype="fp32", tf32=True), Compute(), GPU)


def test_deterministic_takes_deterministic_operations_alone(h200: None) -> None:
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "the flash kernels honour errors alone"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_arithmetic(Precision(), Compute(), GPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_of_the_users_own_stays(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_on_a_cpu_deterministic_changes_nothing() -> None:
    before = state()
    set_arithmetic(Precision(), Compute(deterministic=True), CPU)
    assert state() == before
