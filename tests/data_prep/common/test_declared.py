"""Files of a folder that declare something: found by themselves, with settings that do not get lost."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from data_prep.common.declared import declared_in, foreign_values, joined_settings
from data_prep.common.errors import UserError
from data_prep.common.sections import NamedSection


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


class AlsoSharp(Sharp):
    """With the same edge, and a point."""

    point: int = 0
    """How long."""


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
    kinds = {"plain": Common, "sharp": Sharp, "pointed": AlsoSharp}
    joined = joined_settings("Thing", Common, kinds, "plain", "Which way.", __name__)
    assert set(joined.model_fields) == {"name", "speed", "edge", "point"}
    assert joined.__doc__ == "How a thing is done."
    with pytest.raises(UserError, match=r"^other\.py has a setting edge, as sharp\.py has"):
        joined_settings("Thing", Common, {**kinds, "other": Other}, "plain", "Which way.", __name__)


def test_a_setting_of_another_kind_is_told() -> None:
    kinds = {"plain": Common, "sharp": Sharp, "pointed": AlsoSharp}
    joined = joined_settings("Thing", Common, kinds, "plain", "Which way.", __name__)
    given = joined.model_validate({"name": "sharp", "edge": 5, "point": 2})
    assert list(foreign_values("thing", given, Common, kinds)) == [
        'thing.point = 2: is for thing.name = "pointed"; it is "sharp"'
    ]
    assert not list(foreign_values("thing", joined.model_validate({"name": "pointed", "edge": 5}), Common, kinds))
