"""The plan that --check prints; tests/pretraining/planning/ has that of every recipe."""

import re

import pytest
import torch
from support.commands import run_main
from support.training import Place

from pretraining import train as entry


@pytest.mark.usefixtures("leaves_group")
def test_the_plan_with_data(place: Place) -> None:
    command = ["--recipe", str(place.recipe), "--data", str(place.data), "--check"]
    assert "no --data" not in run_main(entry.main, *command)
    assert "fp16 on 3 ranks" in run_main(entry.main, *command, "--precision.dtype", "fp16", "--ranks", "3"), "elsewhere"
    assert "does not divide by 5 ranks" in run_main(entry.main, *command, "--ranks", "5", code=2)


@pytest.mark.usefixtures("leaves_group")
def test_named_gpus_give_the_hours_of_a_run_elsewhere() -> None:
    """A login node without them does not measure itself, and says what it has assumed."""
    command = ["--recipe", "bert_large_lamb", "--check", "--ranks", "64"]
    printed = " ".join(run_main(entry.main, *command, "--gpu", "h100-80").split())
    assert "hours for 8 nodes of 8 h100-80 with 80 GB, joined by ndr400x8; bf16; 53% of a GPU" in printed
    assert re.search(r"in all 8,601 85.3 B [12] h \d\d m", printed)
    assert "--ranks 0: at least 1" in run_main(entry.main, *command, "--ranks", "0", code=2)
    words = "--recipe demo --check --gpu h100-80 --ranks 12 --phases.0.batch 96 --phases.1.batch 96".split()
    words += "--phases.0.micro_batch auto --phases.1.micro_batch auto".split()
    assert "12: do not divide into nodes of 8" in run_main(entry.main, *words, code=2)
    said = run_main(entry.main, "--recipe", "demo", "--ranks", "64", "--gpu", "h200", code=2)
    assert "--ranks: only with --check\n--gpu: only with --check" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured")
@pytest.mark.usefixtures("leaves_group")
def test_a_login_node_says_nothing_of_other_machines() -> None:
    printed = " ".join(run_main(entry.main, "--recipe", "bert_large_lamb", "--check", "--ranks", "64").split())
    assert "hours: unknown, as the run will be on other machines; name the GPUs, as in --gpu" in printed
    assert "TFLOP/s" not in printed
    assert " h " not in printed
