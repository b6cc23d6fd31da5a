"""What keeps the weights of one shape from a model of another, by the names that recipes have."""

from __future__ import annotations

from dataclasses import fields, replace

from pretraining.config.settings import Model
from pretraining.model.shape import DROPOUT, Shape

TINY = Shape.from_size("tiny", vocabulary=100)


def test_differences_are_told() -> None:
    other = replace(TINY, hidden=256, vocabulary=99)
    assert TINY.differences(other) == [("hidden", 128, 256), ("vocabulary", 100, 99)]
    assert other.differences(TINY) == [("hidden", 256, 128), ("vocabulary", 99, 100)]


def test_weights_do_not_depend_on_dropout() -> None:
    assert not TINY.differences(replace(TINY, dropout=0.0, attention_dropout=0.0))


def test_every_number_has_its_name_in_the_recipe_or_one_in_words() -> None:
    names = {field.name for field in fields(Shape)} - {*DROPOUT, "vocabulary", "objective", "pairs", "sees"}
    assert names <= set(Model.model_fields)
