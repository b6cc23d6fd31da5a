"""`parallel.same_bits`: a run has the same bits on any number of ranks, also one that goes on with others."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.training import Place, assert_refused, measured
from torch import Tensor

from pretraining.checkpoint.record import list_finished

SAME = """
--parallel.same-bits true --compute.threads 1 --evaluation.every 3 --optimizer.clip 0.5
--phases.0.micro-batch 12 --phases.1.micro-batch 3
""".split()
"""Of three ranks, one has no micro-batch in the first phase, and one has two in the second."""


def join_state(run: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint, each parameter in one piece, whatever rank had which part."""
    parts = defaultdict[str, dict[int, Tensor]](dict)
    for path in list_finished(run)[-1].glob("*.safetensors"):
        for name, value in load_file(path).items():
            parameter, _, start = name.rpartition(":")
            parts[f"{path.name.split('-')[0]} {parameter}"][int(start)] = value.view(-1)
    return {name: torch.cat([found[start] for start in sorted(found)]) for name, found in parts.items()}


def assert_same_bits(run: Path, wanted: Path) -> None:
    """Weights, the state of the optimizer, and metrics."""
    ours, theirs = join_state(run), join_state(wanted)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert measured(run) == measured(wanted)


WAYS = {
    "adamw": [],
    "lamb": ["--optimizer.name", "lamb"],
    "muon bf16": ["--optimizer.name", "muon", "--precision.dtype", "bf16"],
    "lamb bf16": ["--optimizer.name", "lamb", "--precision.dtype", "bf16"],
    "muon": ["--optimizer.name", "muon"],
    "adamw bf16": ["--precision.dtype", "bf16"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_has_the_same_bits(shared: Place, way: str, ranks: int) -> None:
    if not (one := shared.folder / f"{way} on 1").exists():
        shared.train(one.name, *SAME, *WAYS[way], ranks=1)
    shared.train(f"{way} on {ranks}", *SAME, *WAYS[way], ranks=ranks)
    assert_same_bits(shared.folder / f"{way} on {ranks}", one)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--parallel.zero", "2"], ["needs parallel.zero = 1; it is 2"]),
        (["--precision.dtype", "fp16"], ["not with precision.dtype"]),
        (["--parallel.offload", "optimizer"], ['not with parallel.offload = "optimizer"']),
        (["--parallel.tensor", "2"], ["not with parallel.tensor = 2; take 1"]),
        (["--phases.0.micro-batch", "7"], ["phases.0.batch = 24: does not divide by 1 rank x"]),
    ],
)
def test_what_would_give_other_bits_is_refused(shared: Place, words: list[str], messages: list[str]) -> None:
    assert_refused(shared.command("refused", *SAME, *words), *messages)
