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
    words = "--gpu v100-32 --gpus-per-node 16 --network edr100x8".split()
    printed = " ".join(run_main(entry.main, *command, *words).split())
    assert "4 nodes of 16 v100-32 with 32 GB, joined by edr100x8; fp16" in printed
    for mistake, said in (
        ("--ranks 0 --gpus-per-node 0", "--ranks 0: at least 1\n--gpus-per-node 0: at least 1"),
        ("--gpu h100-80 --gpus-per-node 7", "--gpus-per-node 7: 64 ranks do not divide into nodes of 7"),
    ):
        assert said in run_main(entry.main, *command, *mistake.split(), code=2)
    said = run_main(entry.main, "--recipe", "demo", "--ranks", "64", "--gpu", "h200", code=2)
    assert "--ranks: only with --check; leave it out\n--gpu: only with --check" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured")
@pytest.mark.usefixtures("leaves_group")
def test_a_login_node_says_nothing_of_other_machines() -> None:
    printed = " ".join(run_main(entry.main, "--recipe", "bert_large_lamb", "--check", "--ranks", "64").split())
    assert "hours: it will run elsewhere, of which this machine says nothing; name the GPUs, as in --gpu" in printed
    assert "TFLOP/s" not in printed
    assert " h " not in printed
