"""`train.py --check --gpu` on a login node: a plan that does not fit is a mistake, which says what would fit."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT

COMMAND = [sys.executable, str(ROOT / "pretraining" / "train.py"), "--check", "--recipe", "bert_large_lamb"]
HUGE = "--model.hidden 4096 --model.heads 64 --ranks 8".split()


def check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)


def test_hours_are_those_of_the_gpu_that_is_named() -> None:
    done = check("--ranks", "64", "--gpu", "h100-80")
    assert done.returncode == 0, done.stderr
    assert "8 nodes of 8 h100-80" in done.stdout


def test_what_does_not_fit_is_a_mistake_with_its_cures() -> None:
    done = check("--gpu", "v100-32", *HUGE)
    assert done.returncode == 2
    assert re.search(r"needs \d+\.\d GB a rank under ZeRO 1 with .*, and may take ..\.. of 32.0 GB; ", done.stderr)
    for cure in re.findall(r"(--\S+ \S+) fits", done.stderr):
        assert check("--gpu", "v100-32", *HUGE, *cure.split()).returncode == 0, "what is said to fit does"


def test_a_given_micro_batch_that_is_too_large() -> None:
    given = "--gpu v100-32 --ranks 8 --phases.0.micro_batch 8192".split()
    done = check(*given)
    assert done.returncode == 2
    assert done.stderr.endswith("; --phases.0.micro_batch auto fits\n"), "nothing else makes room for so many"
    assert check(*given[:-2], "--phases.0.micro_batch", "auto").returncode == 0


def test_a_network_needs_gpus() -> None:
    done = check("--network", "hdr200x8")
    assert done.returncode == 2
    assert "--network and --gpus-per-node: of which GPUs?" in done.stderr
