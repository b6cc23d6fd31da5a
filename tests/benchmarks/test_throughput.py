"""Each side of a contest is what it says to be, and one that fails is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.pretraining_reference import SMALL

from benchmarks import throughput
from benchmarks.throughput import hear, take_part
from data_prep.common.errors import UserError

SETTINGS = ("GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

MAKES_THE_PEER = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})  # as a script's process has it, and what it spawns
import torch
from benchmarks.throughput import SIDES
from pretraining.model.shape import Shape
SIDES["transformers"][0](Shape.named("tiny", 1000), torch.device("cpu"))
print(json.dumps([name for name in {SETTINGS!r} if name in os.environ]))
"""


def test_the_plain_peer_has_none_of_our_settings() -> None:
    """transformers looks for packages by their names, and must find none of our scripts."""
    plain = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", MAKES_THE_PEER], env=plain, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def failing(error: Exception) -> Any:
    """A side that cannot be made."""

    def make(*_: Any) -> None:
        raise error

    return make, False


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("no bf16 here"), "peer: no bf16 here"),
        (torch.OutOfMemoryError("CUDA out of memory"), "peer: no memory for such a step; give fewer sequences"),
    ],
)
def test_a_side_that_fails_is_told_in_one_line(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(throughput.SIDES, "peer", failing(error))
    ours, theirs = Pipe()
    take_part("peer", SMALL, torch.device("cpu"), theirs)
    with pytest.raises(UserError, match=told):
        hear("peer", ours)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(throughput.SIDES, "peer", failing(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        take_part("peer", SMALL, torch.device("cpu"), Pipe()[1])


def test_a_side_that_dies_is_named() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(UserError, match="peer: its process has ended"):
        hear("peer", ours)
