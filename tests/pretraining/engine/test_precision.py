"""In which numbers a model computes, what a GPU is and can do, and what is refused where a device has it not."""

import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.commands import assert_refusal
from support.processes import spawn
from torch.utils import deterministic

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining import devices
from pretraining.config.settings import Compute, Precision
from pretraining.devices import explain_absence, explain_unused, has_flash
from pretraining.engine.precision import choose_dtype, explain_slowness, set_arithmetic
from pretraining.processes.group import choose_device

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


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
T4, H200 = ("Tesla T4", (7, 5)), ("H200", (9, 0))


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], code: Sequence[str] = CUDA_13
) -> None:
    """A GPU that this PyTorch has such code for."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: code)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, *H200)


def test_what_a_processor_without_bf16_costs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for has_bf16 in (True, False):
        monkeypatch.setattr(devices, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        chosen = choose_dtype("auto", CPU)
        told = [str(explain_slowness(wanted, CPU)) for wanted in ("auto", "bf16")]
        assert chosen == (torch.bfloat16 if has_bf16 else torch.float32)
        assert has_bf16 == (told == ["None", "None"]) == ("no fast bf16" not in told[0])
        assert has_bf16 == ("emulates bf16" not in told[1])
        assert explain_slowness("fp32", CPU) is None, "it is what was asked for"
    assert explain_slowness("bf16", GPU) is None


@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE"])
def test_products_that_onednn_may_not_use_are_not_there(limit: str) -> None:
    """Else sums of products of 8 bits would saturate at 16 bits, and be wrong without a warning."""
    (done,) = spawn(1, devices.cpu_has_int8, environment={"ONEDNN_MAX_CPU_ISA": limit})
    assert (done.result, done.errors) == (False, "")


@pytest.mark.parametrize(("gpu", "auto"), [(T4, torch.float16), (H200, torch.bfloat16)])
def test_gpus_compute_in_the_best_type_that_they_have(gpu: Any, auto: torch.dtype, monkeypatch: Any) -> None:
    pretend_gpu(monkeypatch, *gpu)
    assert choose_dtype("auto", GPU) == auto


@pytest.mark.parametrize(
    ("gpu", "device", "dtype", "message"),
    [
        (H200, CPU, "fp16", r'precision.dtype = "fp16": not on a CPU; take "bf16", "fp32"'),
        (T4, GPU, "bf16", r'"bf16": Tesla T4 has none; take "fp16" or "auto"'),
    ],
)
def test_what_a_device_has_not_is_refused(
    gpu: Any, device: torch.device, dtype: Any, message: str, monkeypatch: Any
) -> None:
    pretend_gpu(monkeypatch, *gpu)
    assert_refusal(message, set_arithmetic, Precision(dtype=dtype), Compute(), device)


@pytest.mark.usefixtures("gpu")
def test_products_in_fp32_have_all_its_digits() -> None:
    torch.set_float32_matmul_precision("high")
    set_arithmetic(Precision(dtype="fp32"), Compute(), GPU)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("gpu")
def test_deterministic_takes_deterministic_operations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a workspace that makes products so, unless the user has chosen one."""
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "the flash kernels honour errors alone"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_arithmetic(Precision(), Compute(), GPU)
    assert not torch.are_deterministic_algorithms_enabled()
    set_arithmetic(Precision(), Compute(deterministic=True), CPU)
    assert not torch.are_deterministic_algorithms_enabled(), "results of a CPU are the same bits anyway"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_arithmetic(Precision(), Compute(deterministic=True), GPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


def pretend_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA that cannot speak with the driver of this machine."""
    error = RuntimeError(f"{OLD_DRIVER}\nPlease update your GPU driver")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", Mock(side_effect=error))


def test_a_driver_that_is_too_old_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_old_driver(monkeypatch)
    assert explain_absence() == (OLD_DRIVER, "check nvidia-smi, and that its driver fits this torch")
    with pytest.raises(UserError, match=r"^a GPU was asked for, but The NVIDIA driver .*\n.*or take the device `auto`"):
        choose_device("cuda", World())


def test_a_gpu_that_is_not_used_is_told_of_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_old_driver(monkeypatch)
    monkeypatch.setattr(devices, "NODES", (tmp_path,))
    with pytest.warns(UserWarning, match="there is a GPU here, and it is not used: The NVIDIA driver"):
        assert choose_device("auto", World(0, 2, 0, 2)) == torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_device("auto", World(1, 2, 1, 2))
        choose_device("cpu", World())
        monkeypatch.setattr(devices, "NODES", (tmp_path / "none",))
        choose_device("auto", World())
    assert explain_unused() == ""


def test_of_gpus_of_amd_nothing_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say 9.4 where NVIDIA's say their compute capability, which means something else."""
    pretend_gpu(monkeypatch, "AMD Instinct MI300X", (9, 4), ["gfx942"])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    device = torch.device("cuda", 0)
    assert has_flash(device)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_flash(device)
    assert choose_device("auto", World()) == device
