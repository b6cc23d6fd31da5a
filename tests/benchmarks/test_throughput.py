"""Each side of a contest is what it says to be, and one that fails is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from conftest import ROOT

SETTINGS = ("GOMP_SPINCOUNT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")

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
