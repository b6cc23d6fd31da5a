"""Exit codes as a person reads them."""

from __future__ import annotations

import pytest

from data_prep.common.codes import MEANINGS, Code, explain_code


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (75, "75 (saved and stopped)"),
        (130, "130 (Ctrl-C)"),
        (137, "137 (killed by SIGKILL)"),
        (143, "143 (killed by SIGTERM)"),
        (255, "255"),
        (3, "3"),
    ],
)
def test_a_code_is_told_with_its_meaning(code: int, words: str) -> None:
    assert explain_code(code) == words


def test_every_code_has_a_meaning() -> None:
    assert MEANINGS.keys() == set(Code)
