"""The sentences of Table 8 are masked as its rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training import Place

from benchmarks.reproduction.declaration import Row, declared
from benchmarks.reproduction.masked_text import EXAMPLE, masked_by, masked_sentences
from benchmarks.reproduction.steps import Planner
from data_prep.inspection.lookup import Wanted, find_example
from data_prep.vocabulary.vocabulary import MASK
from pretraining.config.overrides import load_recipe
from pretraining.objectives.declaration import configured

SPLITS = [row for row in declared("table8", "demo").rows if row.name[0].isdigit()]
EPOCHS = 150


@pytest.mark.parametrize("row", SPLITS, ids=lambda row: row.name)
def test_a_row_masks_in_the_shares_that_it_is_called_after(shared: Place, row: Row) -> None:
    """The name has [MASK], itself and a random piece; the recipe has the last two the other way round."""
    example, vocabulary = find_example(Wanted(shared.data, index=EXAMPLE))
    objective = configured(load_recipe(Path("demo"), row.train).objective)
    counts = {"mask": 0, "same": 0, "random": 0}
    for epoch in range(EPOCHS):
        found = masked_by(objective, example, vocabulary, epoch)
        for place, was in found.labels.items():
            now = found.pieces[place]
            counts["mask" if vocabulary.pieces[now] == MASK else "same" if now == was else "random"] += 1
    total = sum(counts.values())
    shares = [int(part) / 100 for part in row.name.split("/")]
    for count, share in zip(counts.values(), shares, strict=True):
        chance = 2 / len(vocabulary)  # a random piece may be the one that it was, or [MASK]
        reach = 4 * (share * (1 - share) / total) ** 0.5 + chance
        assert abs(count / total - share) <= reach, counts


def test_every_row_with_a_model_of_its_own_shows_the_same_text(shared: Place, tmp_path: Path) -> None:
    table = declared("table8", "demo")
    assert masked_sentences(table, tmp_path) == {}
    place = tmp_path / Planner(table).shards(table.rows[0]).name
    place.parent.mkdir()
    place.symlink_to(shared.data)
    found = masked_sentences(table, tmp_path)
    assert [*found] == ["masks of the shards", *(row.name for row in SPLITS)]
    assert [len(texts) for texts in found.values()] == [1, *[3] * len(SPLITS)]
    assert all(f"→{MASK}" in text for text in found["100/0/0"])
    assert not any(MASK in text for text in found["0/0/100"])
