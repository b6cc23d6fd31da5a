"""What a GPU is and can do is asked in one place: one without code is refused, one that is not used is told of."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from data_prep.common.errors import UserError
from data_prep.common.launchers import World
from pretraining import devices
from pretraining.devices import explain_absence, explain_unused, has_flash, has_tf32, require_code
from pretraining.processes.group import choose_device

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


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."


def pretend_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA that cannot speak with the driver of this machine."""

    def refuse() -> int:
        raise RuntimeError(f"{OLD_DRIVER}\nPlease update your GPU driver")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", refuse)


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


def test_a_torch_for_cpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert explain_absence() == ("this torch is built for CPUs alone", "install a torch that is built for your GPU")


def test_of_gpus_of_amd_nothing_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say 9.4 where NVIDIA's say their compute capability, which means something else."""
    pretend_gpu(monkeypatch, "AMD Instinct MI300X", (9, 4), ["gfx942"])
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    device = torch.device("cuda", 0)
    assert has_flash(device)
    assert has_tf32(device)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_flash(device)
    assert not has_tf32(device)
    assert choose_device("auto", World()) == device
