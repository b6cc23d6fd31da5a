"""The comparison of gradients, through its command: both sides are what they are called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from conftest import ROOT
from support.shards import make_shards

from benchmarks.gradients import Way, make_engine
from pretraining.engine.gradients import Zero1
from pretraining.model.shape import Shape
from pretraining.processes.group import connect, disconnect
from pretraining.processes.launchers import World


def test_one_side_is_ours_and_the_other_deepspeeds() -> None:
    shape = Shape(layers=1, hidden=16, heads=2, intermediate=32, vocabulary=50, positions=16)
    connect(World(), torch.device("cpu"))
    for way in (Way(), Way("fp32"), Way(zero=2)):
        for ours in (True, False):
            engine = make_engine(shape, way, torch.device("cpu"), ours)
            assert isinstance(engine.deepspeed.optimizer, Zero1) == ours
            assert engine.zero == (1 if ours else way.zero)
    disconnect()


def test_the_command_keeps_the_ratio(tmp_path: Path) -> None:
    way = "ZeRO 1 in bf16"
    shards, out = make_shards(tmp_path / "data"), tmp_path / "found.json"
    options = ["--contest", "tiny-32-4", "--micro", "2", "--rounds", "1", "--ways", way]
    command = [sys.executable, "benchmarks/gradients.py", *options, "--shards", str(shards), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(out.read_text())["contests"].values()
    assert found["times_as_fast_as"][way] > 0
    assert f"{way}: ours is" in done.stdout
