"""What a recipe may say: the recipes of the house, the settings and their page, and the arithmetic of a step."""

from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from support.recipe_pages import make_pages
from support.training import TAKE_WHAT_FITS, completing

from data_prep.common.errors import UserError
from data_prep.common.reading import known_keys
from data_prep.common.sections import Section
from pretraining.config.overrides import load_recipe
from pretraining.config.settings import Phase, Recipe, count_micro_batches, list_divisors

RECIPES = sorted((ROOT / "pretraining/recipes").glob("*.toml"))
PROMISED = """
demo 1 2
bert_mini 1 2
bert_mini_two_hours 1 2
modern_mini_two_hours 1 2
bert_base_adam 1 2 4 8
bert_large_adam 1 2 4 8
bert_base_lamb 1 8 16 64 256 1024
bert_large_lamb 1 8 16 64 256 1024
bert_large_1472_gpus 1472
bert_large_budget 1 8
roberta_base 1 8 1024
roberta_large 1 8 1024
gpt_base 1 8 64
gpt2_small 1 8 512
gpt2_8b 8 512
modern_base 1 8 64
adapt 1 2 4 8
"""
RANKS = {name: [*map(int, ranks)] for name, *ranks in map(str.split, PROMISED.strip().splitlines())}
"""Numbers of ranks that the comments of recipes promise."""


def test_the_recipes_are_those_that_are_tested() -> None:
    assert {path.stem for path in RECIPES} == RANKS.keys()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_works_on_the_ranks_that_it_promises_and_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    words = ["--deepspeed.zero_optimization.reduce_bucket_size", "1000", *completing(path)]
    for ranks in RANKS[path.stem]:
        recipe = load_recipe(path, words, ranks=ranks, device="cpu", lengths=[32, 64, 128, 512, 1024, 8192])
        for phase in recipe.phases:
            open_to = list_divisors(phase.batch // ranks)
            for size in open_to if phase.micro_batch == "auto" else [phase.micro_batch]:
                assert count_micro_batches(phase, ranks, found=size) * size * ranks == phase.batch
    kept = tmp_path / "kept.toml"
    kept.write_text(recipe.as_toml())
    assert load_recipe(kept) == Recipe.model_validate(recipe.as_dict()) == recipe
    assert ({phase.micro_batch for phase in recipe.phases} == {"auto"}) == path.stem.startswith(TAKE_WHAT_FITS)
    text = path.read_text()
    assert f"--recipe {path.stem} " in text or path.stem == "demo"
    assert max(map(len, text.splitlines())) <= 120


def test_every_setting_is_documented() -> None:
    kinds = [field.annotation for field in Recipe.model_fields.values()]
    sections: list[type[Section]] = [Recipe, Phase]
    sections += [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


@given(st.integers(1, 2000), st.integers(1, 200), st.integers(1, 65))
def test_what_does_not_divide_is_refused_with_what_does(batch: int, micro_batch: int, ranks: int) -> None:
    phase = Phase(name="p", length=128, batch=batch, micro_batch=micro_batch)
    together = micro_batch * ranks
    if batch % together == 0:
        assert count_micro_batches(phase, ranks) == batch // together
        return
    with pytest.raises(UserError) as caught:
        count_micro_batches(phase, ranks, number=1)
    other = int(str(caught.value).rpartition("take batch = ")[2])
    assert count_micro_batches(phase.model_copy(update={"batch": other}), ranks) * together == other


def test_sizes_by_numbers() -> None:
    recipe = Recipe.model_validate({"model": {"size": "base", "layers": 6, "positions": 128}})
    shape = recipe.model.shape(30522)
    assert (shape.layers, shape.hidden, shape.heads, shape.intermediate, shape.positions) == (6, 768, 12, 3072, 128)
    shape = Recipe.model_validate({"model": {"layers": 2, "hidden": 96, "heads": 3}}).model.shape(100)
    assert (shape.heads, shape.intermediate, shape.vocabulary) == (3, 384, 100)


def test_the_pages_of_recipes_are_up_to_date_and_have_every_key() -> None:
    """`make recipes-page` writes them anew."""
    pages = make_pages()
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page
    parts = dict(part.partition("\n")[::2] for part in next(iter(pages.values())).split("\n## ")[1:])
    titles = {(): "At the top", ("phases", 0): "[[phases]]"}
    for *above, name in known_keys(Recipe):
        table = parts[titles.get(tuple(above), f"[{'.'.join(map(str, above))}]")]
        assert f"\n| `{name}` | " in table or f"[{name}]" in parts or f"[[{name}]]" in parts
