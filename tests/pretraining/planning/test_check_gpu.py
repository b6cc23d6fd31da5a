"""`train.py --check --gpu` on a login node: a plan that does not fit is a mistake, which says what would fit."""

from __future__ import annotations

import re

from support.processes import Done
from support.training import train

COMMAND = ["--check", "--recipe", "bert_large_lamb"]
HUGE = "--model.hidden 4096 --model.heads 64 --ranks 8".split()


def check(*words: str) -> Done:
    [done] = train([*COMMAND, *words], ranks=1)
    return done


def test_hours_are_those_of_the_gpu_that_is_named() -> None:
    done = check("--ranks", "64", "--gpu", "h100-80")
    assert done.code == 0, done.errors
    assert "8 nodes of 8 h100-80" in done.output
    assert re.search(r"from \d+ h \d+ m to \d+ h \d+ m: published runs", done.output)


def test_what_does_not_fit_is_a_mistake_with_its_cures() -> None:
    done = check("--gpu", "v100-32", *HUGE)
    assert done.code == 2
    assert re.search(r"needs \d+\.\d GB a rank under ZeRO 1 with .*, and may take ..\.. of 32.0 GB; ", done.errors)
    for cure in re.findall(r"(--\S+ \S+) fits", done.errors):
        assert check("--gpu", "v100-32", *HUGE, *cure.split()).code == 0, "what is said to fit does"


def test_a_given_micro_batch_that_is_too_large() -> None:
    given = "--gpu v100-32 --ranks 8 --phases.0.micro_batch 8192".split()
    done = check(*given)
    assert done.code == 2
    assert done.errors.endswith("; --phases.0.micro_batch auto fits\n"), "nothing else makes room for so many"
    assert check(*given[:-2], "--phases.0.micro_batch", "auto").code == 0


def test_unknown_gpus_and_networks_are_told_beside_all_other_faults() -> None:
    done = check("--gpu", "h1000", "--network", "ndr4000", "--optimizer.nam", "lamb")
    assert done.code == 2
    for fault in ("--gpu h1000: unknown", "--network ndr4000: unknown", "--optimizer.nam: unknown"):
        assert fault in done.errors


def test_a_network_needs_gpus() -> None:
    done = check("--network", "hdr200x8")
    assert done.code == 2
    assert "--network and --gpus-per-node: of which GPUs?" in done.errors
