"""A contest is written as SIZE-LENGTH-SEQUENCES."""

from __future__ import annotations

import pytest

from benchmarks.contests import Contest
from data_prep.common.errors import UserError


def test_a_contest_is_read_from_its_words() -> None:
    assert Contest.parse("large-512-64") == Contest("large", 512, 64)
    assert Contest.parse("large-512-64").name == "large-512"


@pytest.mark.parametrize("text", ["large-512", "huge-128-4", "base-128-many", "base-128-4-4", ""])
def test_what_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="give SIZE-LENGTH-SEQUENCES, such as base-128-32"):
        Contest.parse(text)
