"""`parallel.same_bits`: a run has the same bits on any number of ranks, also one that goes on with others."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.training import Place, measured
from torch import Tensor

from pretraining.checkpoint.record import list_finished

SAME = ["--parallel.same-bits", "true", "--evaluation.every", "3", "--compute.threads", "1"]


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


@pytest.fixture(scope="module")
def one(shared: Place) -> Path:
    """The run on one rank."""
    shared.train("one", *SAME, ranks=1)
    return shared.folder / "one"


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_has_the_same_bits(shared: Place, one: Path, ranks: int) -> None:
    shared.train(f"on {ranks}", *SAME, ranks=ranks)
    assert_same_bits(shared.folder / f"on {ranks}", one)
