"""Values of the command line, recipes that are nested too deep, and files of a folder that declare something."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, parse_value, read_settings
from data_prep.common.sections import NamedSection, Section, declared_in, joined_settings


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
        read_settings(Form(Section), tmp_path / "menu.toml", find_faults=lambda _: [])
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


class Common(NamedSection):
    """How a thing is done."""

    name: str = "plain"
    """Which way."""
    speed: int = 1
    """How fast."""


class Sharp(Common):
    """With an edge."""

    edge: Annotated[int, Field(ge=0)] = 3
    """How sharp."""


class Other(Common):
    """With another edge."""

    edge: str = "none"
    """What kind."""


def test_a_file_that_declares_what_another_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one thing would have two names, and its settings two owners."""
    package = tmp_path / "some_kinds"
    package.mkdir()
    for name, text in {"__init__": "", "declaration": "", "first": "KIND = object()", "helper": "x = 1"}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    place = str(package / "declaration.py")
    assert list(declared_in(place, "some_kinds", "KIND")) == ["first"]
    (package / "second.py").write_text("from some_kinds.first import KIND")
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"second\.py: first\.py has the same KIND; make another"):
        declared_in(place, "some_kinds", "KIND")


def test_settings_are_joined_unless_one_would_get_lost() -> None:
    kinds = {"plain": Common, "sharp": Sharp}
    joined = joined_settings("Thing", Common, kinds, "plain", "Which way.", __name__)
    assert (set(joined.model_fields), joined.__doc__) == ({"name", "speed", "edge"}, "How a thing is done.")
    with pytest.raises(UserError, match=r"^other\.py has a setting edge, as sharp\.py has"):
        joined_settings("Thing", Common, {**kinds, "other": Other}, "plain", "Which way.", __name__)
