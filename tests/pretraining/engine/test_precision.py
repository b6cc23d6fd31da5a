"""In which numbers a model computes, and what is refused where the device has it not."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
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


CAPABILITIES = {"Tesla T4": (7, 5), "H200": (9, 0)}


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that this machine has a GPU of the name that the test asks for, or an H200, and no Triton."""
    name = getattr(request, "param", "H200")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CAPABILITIES[name])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: name == "H200")
    monkeypatch.setattr(devices, "has_triton", lambda: False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("gpu", "auto"), [("Tesla T4", torch.float16), ("H200", torch.bfloat16)], indirect=["gpu"])
def test_gpus_compute_in_the_best_type_that_they_have(auto: torch.dtype) -> None:
    assert choose_dtype("auto", GPU) == auto


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gpu", "device", "precision", "compute", "message"),
    [
        ("H200", CPU, {"dtype": "fp16"}, {}, r'precision.dtype = "fp16": not on a CPU; take "bf16", "fp32"'),
        ("Tesla T4", GPU, {"dtype": "bf16"}, {}, r'precision.dtype = "bf16": Tesla T4 has none; take "fp16" or "auto"'),
        ("Tesla T4", GPU, {"dtype": "fp32", "tf32": True}, {}, "precision.tf32 = true: Tesla T4 has none; take false"),
        ("H200", GPU, {}, {"compile": True}, r"compute.compile = true: needs Triton[\s\S]*pip install triton"),
    ],
    indirect=["gpu"],
)
def test_what_a_device_has_not_is_refused(
    device: torch.device, precision: dict[str, Any], compute: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        set_arithmetic(Precision(**precision), Compute(**compute), device)


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (cpu_kernels, "find_compiler", None, r"compute.compile = true: needs a C\+\+ compiler"),
        (sysconfig, "get_path", "/nowhere", r"needs Python's headers[\s\S]*install python3-dev"),  # as on Debian
    ],
)
def test_compiling_needs_a_compiler_and_headers(
    owner: Any, name: str, value: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: value)
    with pytest.raises(UserError, match=message):
        set_arithmetic(Precision(), Compute(compile=True), CPU)


@pytest.mark.usefixtures("gpu")
def test_compiling_for_a_gpu_needs_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    set_arithmetic(Precision(), Compute(compile=True), GPU)
    with pytest.raises(UserError, match=r'compute.kernels = "torch": not with compute.compile = true on a GPU'):
        set_arithmetic(Precision(), Compute(compile=True, kernels="torch"), GPU)


def test_compiling_leaves_our_kernels_to_what_is_not_compiled() -> None:
    set_arithmetic(Precision(), Compute(compile=True), CPU)
    assert cpu_kernels.usable(torch.zeros(1))
    set_arithmetic(Precision(), Compute(kernels="torch"), CPU)
    assert not cpu_kernels.usable(torch.zeros(1))


@pytest.mark.usefixtures("gpu")
def test_tf32_is_chosen_and_given_up_again() -> None:
    set_arithmetic(Precision(dtype="fp32", tf32=True), Compute(), GPU)
    assert torch.get_float32_matmul_precision() == "high"
    set_arithmetic(Precision(dtype="fp32"), Compute(), GPU)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("gpu")
def test_deterministic_takes_deterministic_operations_alone() -> None:
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "the flash kernels honour errors alone"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_arithmetic(Precision(), Compute(), GPU)
    assert not torch.are_deterministic_algorithms_enabled()
    set_arithmetic(Precision(), Compute(deterministic=True), CPU)
    assert not torch.are_deterministic_algorithms_enabled(), "results of a CPU are the same bits anyway"


@pytest.mark.usefixtures("gpu")
def test_a_workspace_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
