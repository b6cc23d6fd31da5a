"""A contest is written as SIZE-LENGTH-SEQUENCES; its sides compute alike, in what the device has."""

from __future__ import annotations

import pytest
import torch
from support.pretraining_reference import SMALL, random_batch

from benchmarks import training_sides
from benchmarks.training_sides import Contest, TheirTraining
from data_prep.common.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_contest_is_read_from_its_words() -> None:
    assert Contest.parse("large-512-64") == Contest("large", 512, 64)
    assert Contest.parse("large-512-64").name == "large-512"


@pytest.mark.parametrize("text", ["large-512", "huge-128-4", "base-128-many", "base-128-4-4", ""])
def test_what_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="give SIZE-LENGTH-SEQUENCES, such as base-128-32"):
        Contest.parse(text)


def test_the_peers_batch_is_padded_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its users pad in the workers of a DataLoader, while the step before is computed."""
    theirs = TheirTraining(SMALL, CPU, torch.float32)
    theirs.take(random_batch([7, 12], SMALL.vocabulary))
    monkeypatch.setattr(training_sides, "pad_batch", None)  # nobody can call it now
    before = [each.clone() for each in theirs.model.parameters()]
    theirs.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, theirs.model.parameters(), strict=True))
