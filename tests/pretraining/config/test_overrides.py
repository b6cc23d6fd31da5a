"""Recipes: what they say, take over from a base model and from the command line, and how every mistake is named."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.processes import ROOT
from support.training import PLAIN, faults, write_plain

from data_prep.common.errors import UserError
from data_prep.common.reading import known_keys
from data_prep.common.toml_text import read_toml, toml_text, toml_value
from pretraining.architectures.declaration import make_shape
from pretraining.config.conflicts import find_faults
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.config.settings import Recipe
from pretraining.model.shape import Learning, Shape


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_plain(tmp_path)


def test_overrides_change_what_they_name(plain: Path) -> None:
    """Dashes do for underscores, and whole numbers may have an exponent."""
    words = "--phases.0.steps 1e3 --model.size=mini --compute.deterministic --phases.1.learning_rate 2e-4"
    more = "--parallel.zero 2 --seed 7 --phases.0.micro-batch 32 --deepspeed.zero_optimization.reduce_bucket_size 1e6"
    recipe = load_recipe(plain, [*words.split(), *more.split(), "--deepspeed.wall_clock_breakdown"])
    first, second = recipe.phases
    assert (first.steps, first.micro_batch, first.warmup, second.learning_rate) == (1000, 32, 0.1, 2e-4)
    assert (recipe.model.size, recipe.compute.deterministic, recipe.parallel.zero, recipe.seed) == ("mini", True, 2, 7)
    assert recipe.deepspeed == {"wall_clock_breakdown": True, "zero_optimization": {"reduce_bucket_size": 1e6}}


def test_a_flag_takes_the_place_of_what_it_excludes(plain: Path) -> None:
    masks = [f"--objective.{name}=" for name in ("masks", "rate", "last_rate")]
    recipe = load_recipe(Path("bert_mini_two_hours"), ["--objective.name", "ltr", *masks])
    assert recipe.objective.name == "ltr", "an empty value leaves out what the file says"
    recipe = load_recipe(plain, ["--phases.0.warmup_steps", "5"])
    assert (recipe.phases[0].warmup, recipe.phases[0].warmup_steps) == (0.0, 5)
    words = "--steps 200 --phases.0.share 0.9 --phases.1.share 0.1"
    assert load_recipe(plain, words.split()).phase_steps() == (180, 20)


TREES = st.recursive(
    st.none().filter(lambda _: False) | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), TREES, max_size=4))
def test_what_is_written_as_toml_reads_back_the_same(table: dict[str, Any]) -> None:
    assert read_toml(toml_text(table)) == table


AFTER = "after validation, not 3"  # pydantic's words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # kinds and limits
        ("--phases.0.learning_rate x", '--phases.0.learning_rate = "x": should be a valid number'),
        ("--phases.0.learning_rate nan", "--phases.0.learning_rate = nan: should be a finite number"),
        ("--phases.0.steps true", "--phases.0.steps = true: should be a valid integer"),
        ("--phases.0.name 512", '--phases.0.name = 512: a text is needed, in quotes: "…"'),
        ("--model.dropout 1", "--model.dropout = 1: should be less than 1"),
        ("--parallel.zero --seed 3", "--parallel.zero = true: should be a valid integer"),
        ("--compute.deterministic maybe", '--compute.deterministic = "maybe": should be a valid boolean'),
        ("--optimizer.name sgd", "--optimizer.name = \"sgd\": should be 'adamw', 'lamb' or 'muon'"),
        ("--optimizer.betas [0.9]", "--optimizer.betas.1: is missing"),
        ("--optimizer.betas 0.9", "--optimizer.betas = 0.9: a list is needed"),
        ("--optimizer.betas [1,2,3]", f"--optimizer.betas = [1, 2, 3]: should have at most 2 items {AFTER}"),
        ("--evaluation 3", "--evaluation = 3: a table is needed"),
        ("--objective.masks whole", "--objective.masks = \"whole\": should be 'static' or 'dynamic'"),
        # places
        ("foo", "foo: not understood; a value of the recipe is given as --section.key value"),
        ("--phases.2.steps 3", "--phases.2.steps: no number 2 in phases; there is 0 to 1"),
        ("--phases.steps 3", "--phases.steps: no number steps in phases; there is 0 to 1, as in --phases.0.steps"),
        ("--phases.N.steps 3", "--phases.N.steps: no number N in phases; there is 0 to 1, as in --phases.0.steps"),
        ("--model.size.x 3", '--model.size.x: model.size is "tiny", not a table'),
        # names
        ("--model.droput 0.2", "--model.droput: unknown; did you mean model.dropout?"),
        ("--optimizer.lr 1", "--optimizer.lr: unknown; did you mean phases.0.learning_rate?"),
        ("--phases.1.lr 1", "--phases.1.lr: unknown; did you mean phases.1.learning_rate?"),
        ("--model-size base", "--model_size: unknown; did you mean model.size?"),
        ("--optimiser.clip 1", "--optimiser: unknown; did you mean optimizer?"),
        ("--card.qqqqq 1", "--card.qqqqq: unknown; there is licence"),
    ],
)  # fmt: skip
def test_values_places_and_names_that_cannot_be_are_named(plain: Path, words: str, expected: str) -> None:
    assert faults(plain, *words.split()) == [expected]


def test_a_file_that_is_not_there_or_no_toml_is_named(plain: Path) -> None:
    missing = plain.with_name("plane.toml")
    assert faults(missing) == [f"--recipe {missing}: no such file"]
    for content in (b"[model\n", b"\xff\xfe"):
        plain.write_bytes(content)
        [fault] = faults(plain)
        assert fault.startswith(f"--recipe {plain}: cannot be read: ")


SCRAPS: st.SearchStrategy[Any] = (
    st.just({}) | st.text() | st.integers() | st.booleans() | st.floats() | st.lists(st.integers())
)


@example({("phases",): [0]})
@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(sorted(known_keys(Recipe), key=str)), SCRAPS, min_size=1, max_size=5))
def test_scraps_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, scraps: dict[Any, Any]) -> None:
    """A recipe is read, or refused with lines that each name a place."""
    path = tmp_path_factory.getbasetemp() / "scraps.toml"
    path.write_text(PLAIN)
    words = ["--" + ".".join(map(str, key)) + "=" + toml_value(value) for key, value in scraps.items()]
    try:
        recipe = load_recipe(path, words, ranks=2, lengths=[32, 128, 512])
    except UserError as error:
        for line in str(error).splitlines():
            assert re.match(rf"(--|{re.escape(str(path))}: )[\w.]+(:| = )", line), line
    else:
        assert not find_faults(recipe, ranks=2)


def test_our_recipes_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory; a file of that path comes first, and a folder does not count."""
    monkeypatch.chdir(tmp_path)
    ours = load_recipe(RECIPES / "demo.toml")
    (tmp_path / "demo").mkdir()
    for name in ("demo", "demo.toml"):
        assert load_recipe(Path(name), ["--seed", "12345"]) == ours
    write_plain(tmp_path).rename(tmp_path / "demo.toml")
    assert load_recipe(Path("demo")) == ours
    assert load_recipe(Path("demo.toml")) != ours
    assert load_recipe(tmp_path / "demo.toml") != ours


def test_recipes_come_with_the_package() -> None:
    settings = read_toml((ROOT / "pyproject.toml").read_text())
    assert "recipes/*.toml" in settings["tool"]["setuptools"]["package-data"]["pretraining"]


def test_an_unknown_name_lists_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
    assert faults(Path("dem")) == ["--recipe dem: no such file, and no recipe of this name", f"there is {names}"]
    assert faults(Path("mine/dem.toml")) == ["--recipe mine/dem.toml: no such file"]


SHAPE = Shape(3, 96, 4, 200, 1000, positions=600, segments=3, dropout=0.2, attention_dropout=0.3, epsilon=1e-5)
PHASES = PLAIN[PLAIN.index("[[phases]]") :]


def find_shape(name: str) -> Shape:
    if name != "bert":
        raise UserError(f"{name}: no such folder")
    return SHAPE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(PHASES)
    return tmp_path / "recipe.toml"


def test_a_recipe_without_sizes_has_all_of_the_base_model(path: Path) -> None:
    recipe = load_recipe(path, ["--base_model", "bert"], find_shape=find_shape)
    assert (recipe.model.shape(1000), recipe.base_model) == (SHAPE, "bert")
    kept = path.with_name("kept.toml")
    kept.write_text(recipe.as_toml())
    assert load_recipe(kept, find_shape=find_shape) == recipe == load_recipe(kept)


def test_dropout_is_the_recipe_s_own_and_more_positions_may_be_given(path: Path) -> None:
    path.write_text(f'base_model = "bert"\n[model]\ndropout = 0.0\npositions = 700\nhidden = 96\n{PHASES}')
    shape = load_recipe(path, find_shape=find_shape).model.shape(1000)
    assert (shape.dropout, shape.attention_dropout, shape.positions, shape.hidden) == (0.0, 0.3, 700, 96)


def test_other_sizes_are_refused_by_name(path: Path) -> None:
    words = ["--model.hidden", "64", "--model.epsilon", "1e-12", "--model.positions", "512", "--model.size", "tiny"]
    assert faults(path, "--base_model", "bert", *words, find_shape=find_shape) == [
        "--model.hidden = 64: bert has 96; leave it out (see --recipe adapt)",
        "--model.positions = 512: bert has 600; leave it out, or give more, which begin anew",
        "--model.epsilon = 1e-12: bert has 1e-05; leave it out (see --recipe adapt)",
        '--model.size = "tiny": bert has 3 layers of 96; leave it out (see --recipe adapt)',
    ]
    path.write_text(f'base_model = "bert"\n[model]\nlayers = 2\n{PHASES}')
    told = f"{path}: model.layers = 2: bert has 3; leave it out (see --recipe adapt)"
    assert faults(path, find_shape=find_shape) == [told]
    assert "should be a valid integer" in faults(path, "--model.layers", "x", find_shape=find_shape)[0]


def test_a_base_model_that_reads_another_way_names_the_objective(path: Path) -> None:
    """And not model.architecture, which this recipe does not set."""
    gpt = replace(make_shape("small", 1000, "gpt"), learns=Learning("ltr", pairs=False, sees="before"))
    words = ["--base_model", "gpt2"]
    assert faults(path, *words, find_shape=lambda _: gpt) == [
        f'{path}: objective.name = "mlm": its pieces see all others, but in gpt2 (GPT-2) they see those before it; '
        'take objective.name = "ltr"'
    ]
    assert load_recipe(path, [*words, "--objective.name", "ltr"], find_shape=lambda _: gpt).model.architecture == "gpt"


def test_a_base_model_that_is_not_there_is_told_with_all_else(path: Path) -> None:
    found = faults(path, "--base_model", "bart", "--phases.0.batch", "-1", find_shape=find_shape)
    refused = "--phases.0.batch = -1: should be greater than or equal to 1"
    assert sorted(found) == ["--init bart: no such folder", refused]
    path.write_text(f'base_model = "bart"\n{PHASES}')
    assert faults(path, find_shape=find_shape) == [f"{path}: base_model bart: no such folder"]
