"""Every number says on which machine it was measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import environment


def test_the_gpu_is_named_where_torch_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(name="H200", total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert environment(["torch"]).items() >= {"gpu": "H200", "gpu_memory_gib": 141.0}.items()
    assert "gpu" not in environment(["numpy"])


def test_a_machine_without_a_gpu_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in environment(["torch"])
