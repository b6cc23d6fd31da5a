"""docs/finetuning-recipes.md is what the settings say today."""

from __future__ import annotations

from finetuning.reference import PAGE, page


def test_the_page_is_up_to_date() -> None:
    """`make recipes-page` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()
