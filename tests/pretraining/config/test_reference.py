"""docs/recipes.md: it has every key, and is what the settings say today."""

from __future__ import annotations

from data_prep.common.wording import known_keys
from pretraining.config.reference import PAGE, describe_values, make_reference, make_row
from pretraining.config.settings import Model, Optimizer, Parallel, Phase, Recipe


def test_the_page_is_up_to_date() -> None:
    """`make recipes-page` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == make_reference()


def test_every_key_is_there() -> None:
    parts = dict(part.partition("\n")[::2] for part in make_reference().split("\n## ")[1:])
    titles = {(): "At the top", ("phases", 0): "[[phases]]"}
    for *above, name in known_keys(Recipe):
        table = parts[titles.get(tuple(above), f"[{'.'.join(map(str, above))}]")]
        assert f"\n| `{name}` | " in table or f"[{name}]" in parts or f"[[{name}]]" in parts


def test_limits_are_those_of_the_settings() -> None:
    def taken(settings: type, name: str) -> str:
        return ", or ".join(describe_values(settings.model_json_schema()["properties"][name]))  # type: ignore[attr-defined]

    assert taken(Phase, "micro_batch") == 'a whole number of at least 1, or `"auto"`'
    assert taken(Phase, "steps") == "a whole number of at least 1"
    assert taken(Parallel, "zero") == "a whole number of at least 0 and at most 3"
    assert taken(Phase, "share") == "a number above 0 and at most 1"
    assert taken(Model, "dropout") == "a number of at least 0 and below 1"
    assert taken(Optimizer, "betas") == "a list of 2, each a number of at least 0 and below 1"
    assert taken(Optimizer, "name") == 'one of `"adamw"`, `"lamb"`, `"muon"`'


def test_a_row_has_the_default_or_says_that_there_is_none() -> None:
    assert make_row("warmup", Phase).endswith("| a number of at least 0 and below 1 | `0.0` |")
    assert make_row("length", Phase).endswith("| needed |")
