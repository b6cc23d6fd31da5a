"""Recipes of any kind: a Form says what they can say, where ours lie, and how messages call what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, parse_value, read_settings
from data_prep.common.sections import Positive, Section
from data_prep.common.wording import known_keys


class Dish(Section):
    """What is cooked."""

    name: str
    """What guests call it."""
    minutes: Positive = 10
    """How long it takes."""


class Oven(Section):
    """Where it is cooked."""

    degrees: Positive = 180
    """How hot it is."""


class Menu(Section):
    """A meal."""

    guests: Positive = 2
    """How many come."""
    oven: Oven = Oven(degrees=200)
    """Where it is cooked."""
    dishes: Annotated[tuple[Dish, ...], Field(strict=False)] = ()
    """What is cooked, in this order."""


@pytest.fixture
def form(tmp_path: Path) -> Form[Menu]:
    (tmp_path / "sunday.toml").write_text('[[dishes]]\nname = "soup"\n[[dishes]]\nname = "roast"\nminutes = 90\n')
    return Form(Menu, tmp_path, stand_ins={"dishes": {"name": "?"}}, flags={"guests": "people"})


def read(form: Form[Menu], recipe: str, *words: str) -> Menu:
    def too_hot(menu: Menu) -> list[str]:
        return [f"oven.degrees = {menu.oven.degrees}: too hot"] if menu.oven.degrees > 250 else []

    return read_settings(form, Path(recipe), words, find_faults=too_hot)


def test_a_recipe_of_any_kind_is_read_and_changed(form: Form[Menu], tmp_path: Path) -> None:
    menu = read(form, "sunday", "--dishes.1.minutes", "60", "--guests=4")
    assert menu == Menu(guests=4, dishes=(Dish(name="soup"), Dish(name="roast", minutes=60)))
    kept = tmp_path / "kept.toml"
    kept.write_text(menu.as_toml())
    assert read(form, str(kept)) == menu


def test_its_faults_name_its_own_keys_and_flags(form: Form[Menu], tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[[dishes]]\nminutes = 3\n[oven]\ndegrees = 300\n")
    with pytest.raises(UserError) as caught:
        read(form, "bad", "--guests", "0", "--minuts", "3", "--oven.degree", "3")
    assert str(caught.value).splitlines() == [
        "--people = 0: at least 1",
        "--oven.degree: unknown; did you mean oven.degrees?",
        "bad: dishes.0.name: is missing: what guests call it",
        "--minuts: unknown; did you mean dishes.0.minutes?",
        "bad: oven.degrees = 300: too hot",
    ]
    with pytest.raises(UserError, match=r"^--recipe sundy: .*did you mean sunday\?\nthere is bad, sunday$"):
        read(form, "sundy")


def test_known_keys_are_those_of_tables_and_lists() -> None:
    assert [".".join(map(str, key)) for key in known_keys(Menu)] == [
        "guests", "oven", "oven.degrees", "dishes", "dishes.0.name", "dishes.0.minutes",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), (".5", 0.5), ("5.", 5.0), ("true", True), ("10_000", 10000), ("bf16", "bf16"), ("-1", -1),
        ("[0.9, 0.98]", [0.9, 0.98]), ('"512"', "512"), ("a = 3", "a = 3"), ("1\nb = 2", "1\nb = 2"), ("", ""),
    ],
)  # fmt: skip
def test_values_of_the_command_line(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "guests = " + "[" * 200_000 + "]" * 200_000,
        "guests = " + "[" * 100 + "]" * 100,
        "guests" + ".a" * 50_000 + " = 1",
        "[" + '"a" . ' * 50_000 + "a]",
    ],
    ids=["deep", "deeper than any", "long key", "long name of a table"],
)
def test_a_file_that_is_nested_too_deep_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    """The parser would recurse, or take minutes."""
    (tmp_path / "menu.toml").write_text(text)
    with pytest.raises(UserError, match=r"menu\.toml: cannot be read: nested more than 50 deep.*") as caught:
        read_settings(Form(Menu), tmp_path / "menu.toml", find_faults=lambda _: [])
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
