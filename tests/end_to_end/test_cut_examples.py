"""A phase may have a length that the data lacks: its sequences are cut out of the next longer examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import run_main
from support.training import RECIPE, Place, assert_same_curve, records

from data_prep.common.toml_text import read_toml
from pretraining import train as entry


@pytest.fixture
def shorter(place: Place, tmp_path: Path) -> Place:
    """The recipe of a small run, with phases of 24 and 48 pieces; the data has 32 and 64."""
    recipe = tmp_path / "shorter.toml"
    recipe.write_text(RECIPE.replace("length = 32", "length = 24").replace("length = 64", "length = 48"))
    return Place(place.data, recipe, tmp_path)


@pytest.mark.slow
def test_lengths_that_the_data_lacks_are_trained_and_said_to_be_cut(shorter: Place) -> None:
    said = shorter.train("alone", ranks=1)
    assert "sequences of length 24, cut out of examples of 32, " in said
    assert "sequences of length 48, cut out of examples of 64, " in said
    assert len(records(shorter.folder / "alone", "evaluation")) == 2
    card = (shorter.folder / "alone" / "export" / "README.md").read_text()
    trained_with = read_toml(card.rpartition("```toml\n")[2].partition("```")[0])
    assert [(phase["length"], phase["cut_out_of"]) for phase in trained_with["phases"]] == [(24, 32), (48, 64)]
    shorter.train("two", ranks=2)
    assert_same_curve(shorter.folder / "two", shorter.folder / "alone", 1e-4)


@pytest.mark.usefixtures("leaves_group")
def test_the_plan_says_it_too(shorter: Place) -> None:
    printed = run_main(entry.main, "--recipe", shorter.recipe, "--data", shorter.data, "--check")
    assert "24 of 32" in printed
    assert "48 of 64" in printed
