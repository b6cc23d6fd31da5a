"""A GPU that the installed PyTorch has no code for is refused before it is used."""

from __future__ import annotations

import pytest
import torch

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining.processes.group import choose_device, require_code

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], code: list[str]) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: code)


def test_a_v100_needs_the_build_for_cuda_12_6(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "Tesla V100", (7, 0), CUDA_13)
    with pytest.raises(UserError) as refused:
        choose_device("auto", World())
    assert str(refused.value).splitlines() == [
        "Tesla V100 has compute capability 7.0, and this PyTorch 2.13.0+cu130 has code for sm_75, sm_80, sm_86, sm_90, "
        "sm_100, sm_120, compute_120 alone",
        "install the build for CUDA 12.6 (cu126), from PyTorch's own index, or take the device `cpu`",
    ]
    assert choose_device("cpu", World()) == torch.device("cpu")


def test_a_gpu_that_is_too_new_needs_a_newer_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "the next one", (13, 0), ["sm_80", "sm_90a"])
    with pytest.raises(UserError, match="install a newer PyTorch"):
        choose_device("cuda", World())


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ((7, 5), CUDA_13),
        ((8, 9), CUDA_13),  # runs the code of 8.6
        ((10, 3), CUDA_13),
        ((13, 0), CUDA_13),  # compiled when it is loaded
        ((7, 0), ["sm_50", "sm_60", "sm_70"]),
        ((9, 4), ["gfx90a"]),  # not NVIDIA's: nothing is known of these
    ],
)
def test_gpus_with_code_are_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], code: list[str]
) -> None:
    pretend_gpu(monkeypatch, "a GPU", capability, code)
    device = torch.device("cuda", 0)
    assert require_code(device) == choose_device("auto", World()) == device
