"""Values of the command line, recipes that are nested too deep, and settings of several kinds in one table."""

from pathlib import Path
from typing import Any

import pytest

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, parse_value, read_settings
from data_prep.common.sections import NamedSection, Section, joined_settings

VALUES: dict[str, Any] = {"1e-4": 1e-4, ".5": 0.5, "5.": 5.0, "true": True, "10_000": 10000, "bf16": "bf16", "-1": -1}
VALUES |= {"[0.9, 0.98]": [0.9, 0.98], '"512"': "512", "a = 3": "a = 3", "1\nb = 2": "1\nb = 2", "": ""}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_values_of_the_command_line(text: str, value: Any) -> None:
    assert (parse_value(text), type(parse_value(text))) == (value, type(value))


def test_a_file_that_is_nested_too_deep_is_refused_in_a_line(tmp_path: Path) -> None:
    """The parser would recurse."""
    (tmp_path / "menu.toml").write_text("guests = " + "[" * 200_000 + "]" * 200_000)
    with pytest.raises(UserError, match=r"^--recipe .*menu\.toml: cannot be read: nested too deep$"):
        read_settings(Form(Section), tmp_path / "menu.toml", find_faults=lambda _: [])


class Common(NamedSection):
    """How a thing is done."""

    name: str = "plain"
    """Which way."""
    speed: int = 1
    """How fast."""


class Sharp(Common):
    """With an edge."""

    edge: int = 3
    """How sharp."""


class Other(Common):
    """With another edge."""

    edge: str = "none"
    """What kind."""


def test_settings_are_joined_unless_one_would_get_lost() -> None:
    kinds = {"plain": Common, "sharp": Sharp}
    joined = joined_settings("Thing", Common, kinds, "plain", "Which way.", __name__)
    assert (set(joined.model_fields), joined.__doc__) == ({"name", "speed", "edge"}, "How a thing is done.")
    with pytest.raises(UserError, match=r"^other\.py has a setting edge, as sharp\.py has"):
        joined_settings("Thing", Common, {**kinds, "other": Other}, "plain", "Which way.", __name__)
