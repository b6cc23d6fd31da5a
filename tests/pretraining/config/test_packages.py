"""What is said of packages that a recipe asks for and that are not there."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from support.recipes import faults, write_plain

from pretraining.config.overrides import load_recipe
from pretraining.optimizers.lamb import apex_fault

LAMB = ("--optimizer.name", "lamb", "--optimizer.kernels", "apex")
BUILD = "build NVIDIA's from its source: docs/training.md has the command"


def test_the_command_for_apex_builds_what_the_image_has() -> None:
    commit = re.search(r"COMMIT=([0-9a-f]{40})", (ROOT / "cluster/container/install.sh").read_text())
    assert commit
    assert f"git+https://github.com/NVIDIA/apex@{commit[1]}" in (ROOT / "docs/training.md").read_text()


def test_apex_is_nvidias_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amp_C", SimpleNamespace())
    assert apex_fault() is None
    monkeypatch.setitem(sys.modules, "amp_C", None)
    assert apex_fault() == f"apex is not installed; {BUILD}"
    monkeypatch.setattr(importlib.metadata, "version", {"apex": "0.9.10.dev0"}.__getitem__)
    assert "(0.9.10.dev0) has no amp_C: it is another project of that name" in str(apex_fault())


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        (LAMB, "cuda", f'--optimizer.kernels = "apex": apex is not installed; {BUILD}, or take "auto"'),
        (LAMB, "cpu", '--optimizer.kernels = "apex": needs a GPU (parallel.device = "auto"); take "auto"'),
        (
            (*LAMB, "--parallel.offload", "optimizer"),
            "cuda",
            '--optimizer.kernels = "apex": moves weights on a GPU, and parallel.offload = "optimizer"; take "auto"',
        ),
        (
            ("--deepspeed.comet.enabled",),
            "cpu",
            "--deepspeed.comet.enabled = true: comet_ml is not installed; pip install comet_ml, or remove it",
        ),
    ],
)
def test_what_packages_cannot_do_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], device: Any, expected: str
) -> None:
    """On the machine that trains; a plan may be made on another."""
    monkeypatch.setitem(sys.modules, "amp_C", None)
    plain = write_plain(tmp_path)
    assert faults(plain, *words, device=device) == [expected]
    load_recipe(plain, words)
