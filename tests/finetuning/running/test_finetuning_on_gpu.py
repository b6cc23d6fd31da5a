"""Fine-tuning on a GPU: it scores as on a CPU, and what comes out says the same on both."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.finetuning import Toy, results
from support.processes import ROOT

from finetuning.prediction import load


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_run_on_a_gpu_scores_as_on_a_cpu(toy: Toy, dtype: str) -> None:
    if dtype == "bf16" and not torch.cuda.is_bf16_supported():
        pytest.skip("no bf16 here")
    plain = ["--dropout.hidden", "0", "--dropout.attention", "0"]
    scores = {}
    for device, numbers in (("cpu", "fp32"), ("cuda", dtype)):
        command = toy.command(device, "--parallel.device", device, "--precision.dtype", numbers, *plain)
        # a process of its own: those that are forked keep the accelerator that DeepSpeed has chosen for the tests
        train = [sys.executable, str(ROOT / "finetuning" / "run_task.py"), *command]
        done = subprocess.run(train, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        told = results(toy.folder / device)
        assert told["runs"][told["best"]]["device"] == device
        scores[device] = told["score"]
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=0.1)
    texts = ["a good film", "an awful plot", ""]
    both = [load(toy.folder / "cuda" / "toy", "fp32", device)(texts) for device in ("cpu", "cuda")]
    for one, other in zip(*both, strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-3)
