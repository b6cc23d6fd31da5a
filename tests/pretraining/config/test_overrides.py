"""Recipes: what they may say, how the command line changes them, and how every mistake is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import assume, given
from hypothesis import strategies as st

from data_prep.common.errors import UserError
from pretraining.config.overrides import (
    Recipe,
    find_faults,
    known_keys,
    load_recipe,
    micro_batches,
    parse_value,
    tomllib,
)
from pretraining.config.settings import Phase, Section
from pretraining.config.toml_text import toml_text, toml_value

RECIPES = sorted((ROOT / "pretraining/recipes").glob("*.toml"))
RANKS = {  # what their comments promise
    "demo": (1, 2),
    "bert_mini": (1, 2),
    "bert_base_adam": (1, 2, 4, 8),
    "bert_large_adam": (1, 2, 4, 8),
    "bert_base_lamb": (1, 8, 16, 64, 256, 1024),
    "bert_large_lamb": (1, 8, 16, 64, 256, 1024),
    "bert_large_budget": (1, 8),
}

PLAIN = """
[model]
size = "tiny"

[[phases]]
name = "one"
length = 128
batch = 64
micro_batch = 16
steps = 100
learning_rate = 1e-3
warmup = 0.1

[[phases]]
name = "two"
length = 512
batch = 32
micro_batch = 8
steps = 20
"""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.toml"
    path.write_text(PLAIN)
    return path


def faults(path: Path, *overrides: str, **known: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides, **known)
    return str(caught.value).splitlines()


# ---- the recipes of the house ----


def test_the_recipes_are_those_that_are_tested() -> None:
    assert {path.stem for path in RECIPES} == RANKS.keys()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_works_on_the_ranks_that_it_promises(path: Path) -> None:
    for ranks in RANKS[path.stem]:
        recipe = load_recipe(path, ranks=ranks, device="cpu", lengths=[32, 128, 512])
        for phase in recipe.phases:
            assert micro_batches(phase, ranks) * phase.micro_batch * ranks == phase.batch


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_comments_its_numbers_and_names_itself(path: Path) -> None:
    text = path.read_text()
    assert path.name in text or path.stem == "demo"
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 120, f"line {number}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_that_a_run_keeps_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, ["--deepspeed.zero_optimization.reduce_bucket_size", "1000"])
    kept = tmp_path / "kept.toml"
    kept.write_text(recipe.as_toml())
    assert load_recipe(kept) == recipe
    assert Recipe.model_validate(recipe.as_dict()) == recipe


def test_numbers_of_the_paper() -> None:
    recipe = load_recipe(ROOT / "pretraining/recipes/bert_large_adam.toml")
    assert recipe.phase_steps() == (900_000, 100_000)
    assert [phase.length for phase in recipe.phases] == [128, 512]
    assert {phase.batch for phase in recipe.phases} == {256}
    assert (recipe.phases[0].learning_rate, recipe.phases[0].warmup_steps) == (1e-4, 10_000)
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay) == ((0.9, 0.999), 0.01)


def test_numbers_of_nvidia() -> None:
    recipe = load_recipe(ROOT / "pretraining/recipes/bert_large_lamb.toml")
    numbers = [
        (each.length, each.batch, each.steps, each.learning_rate, each.warmup, each.power) for each in recipe.phases
    ]
    assert numbers == [(128, 65536, 7038, 6e-3, 0.2843, 0.5), (512, 32768, 1563, 4e-3, 0.128, 0.5)]
    assert (recipe.optimizer.name, recipe.optimizer.clip) == ("lamb", 1.0)


def test_every_setting_is_documented() -> None:
    sections: list[type[Section]] = [Recipe, Phase]
    sections += [each.annotation for each in Recipe.model_fields.values() if _is_section(each.annotation)]
    for section in sections:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


# ---- the command line ----


def test_overrides_change_what_they_name(plain: Path) -> None:
    words = "--phases.0.steps 10 --model.size=mini --compute.compile --phases.1.learning_rate 2e-4 --parallel.zero 3"
    recipe = load_recipe(plain, [*words.split(), "--seed", "7"])
    assert recipe.phases[0].steps == 10
    assert recipe.model.size == "mini"
    assert recipe.compute.compile
    assert recipe.phases[1].learning_rate == 2e-4
    assert recipe.parallel.zero == 3
    assert recipe.seed == 7
    assert recipe.phases[0].warmup == 0.1


def test_dashes_do_for_underscores(plain: Path) -> None:
    assert load_recipe(plain, ["--phases.0.micro-batch", "32"]).phases[0].micro_batch == 32


def test_deepspeed_takes_what_it_knows(plain: Path) -> None:
    words = "--deepspeed.wall_clock_breakdown --deepspeed.zero_optimization.reduce_bucket_size 1e6"
    recipe = load_recipe(plain, words.split())
    assert recipe.deepspeed == {"wall_clock_breakdown": True, "zero_optimization": {"reduce_bucket_size": 1e6}}


def test_a_flag_takes_the_place_of_what_it_excludes(plain: Path) -> None:
    recipe = load_recipe(plain, ["--phases.0.warmup_steps", "5"])
    assert (recipe.phases[0].warmup, recipe.phases[0].warmup_steps) == (0.0, 5)
    words = "--steps 200 --phases.0.share 0.9 --phases.1.share 0.1"
    assert load_recipe(plain, words.split()).phase_steps() == (180, 20)


def test_whole_numbers_may_have_a_point_or_an_exponent(plain: Path) -> None:
    assert load_recipe(plain, ["--phases.0.steps", "1e3"]).phases[0].steps == 1000
    assert faults(plain, "--phases.0.steps", "1.5") == ["--phases.0.steps = 1.5: a whole number is needed"]


VALUES = {
    ("phases", 0, "steps"): st.integers(20, 10**6),
    ("phases", 1, "learning_rate"): st.floats(1e-9, 1.0),
    ("phases", 0, "name"): st.text(min_size=1),
    ("optimizer", "betas"): st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    ("optimizer", "name"): st.sampled_from(["adamw", "lamb"]),
    ("model", "dropout"): st.floats(0, 0.9),
    ("compute", "compile"): st.booleans(),
    ("precision", "dtype"): st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
    ("checkpoints", "keep"): st.integers(1, 100),
}


@given(
    st.sampled_from(sorted(VALUES, key=str)).flatmap(lambda key: st.tuples(st.just(key), VALUES[key])), st.booleans()
)
def test_what_is_given_on_the_command_line_is_what_the_recipe_has(
    tmp_path_factory: pytest.TempPathFactory, setting: tuple[Any, Any], joined: bool
) -> None:
    key, value = setting
    assume(value != "two")  # the name of the other phase
    path = tmp_path_factory.getbasetemp() / "plain.toml"
    path.write_text(PLAIN)
    flag, text = "--" + ".".join(map(str, key)), toml_value(value)
    found: Any = load_recipe(path, [f"{flag}={text}"] if joined else [flag, text])
    for part in key:
        found = found[part] if isinstance(part, int) else getattr(found, part)
    assert found == value


TREES = st.recursive(
    st.none().filter(lambda _: False) | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), TREES, max_size=4))
def test_what_is_written_as_toml_reads_back_the_same(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(table)) == table


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


# ---- mistakes ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # kinds and limits
        ("--phases.0.learning_rate x", '--phases.0.learning_rate = "x": a number is needed'),
        ("--phases.0.learning_rate 0", "--phases.0.learning_rate = 0: above 0"),
        ("--phases.0.learning_rate nan", "--phases.0.learning_rate = nan: a finite number is needed"),
        ("--phases.0.steps true", "--phases.0.steps = true: a whole number is needed"),
        ("--phases.0.batch 0", "--phases.0.batch = 0: at least 1"),
        ("--phases.0.name 512", '--phases.0.name = 512: a text is needed, in quotes: "…"'),
        ("--model.dropout 1", "--model.dropout = 1: below 1"),
        ("--parallel.zero 4", "--parallel.zero = 4: at most 3"),
        ("--parallel.zero", "--parallel.zero: a value is missing: --parallel.zero VALUE"),
        ("--parallel.zero --seed 3", "--parallel.zero: a value is missing: --parallel.zero VALUE"),
        ("--compute.compile maybe", '--compute.compile = "maybe": true or false is needed'),
        ("--optimizer.name sgd", '--optimizer.name = "sgd": one of "adamw", "lamb"'),
        ("--optimizer.betas [0.9]", "--optimizer.betas.1: is missing"),
        ("--optimizer.betas 0.9", "--optimizer.betas = 0.9: a list is needed"),
        ("--optimizer.betas [1,2,3]", "--optimizer.betas = [1, 2, 3]: 2 values are needed"),
        ("--evaluation 3", "--evaluation = 3: a table is needed"),
        # places
        ("foo", "foo: not understood; a value of the recipe is given as --section.key value"),
        ("--phases.2.steps 3", "--phases.2.steps: no number 2 in phases; there is 0 to 1"),
        ("--phases.steps 3", "--phases.steps: no number steps in phases; there is 0 to 1"),
        ("--model.size.x 3", '--model.size.x: model.size is "tiny", not a table'),
        # names
        ("--model.droput 0.2", "--model.droput: unknown; did you mean model.dropout?"),
        ("--phases.1.warm_up 0.2", "--phases.1.warm_up: unknown; did you mean phases.1.warmup?"),
        ("--optimizer.lr 1", "--optimizer.lr: unknown; did you mean phases.0.learning_rate?"),
        ("--phases.1.lr 1", "--phases.1.lr: unknown; did you mean phases.1.learning_rate?"),
        ("--model-size base", "--model_size: unknown; did you mean model.size?"),
        ("--optimiser.clip 1", "--optimiser: unknown; did you mean optimizer?"),
        ("--parallel.zero_stage 1", "--parallel.zero_stage: unknown; did you mean parallel.zero?"),
        ("--data.qqqqq 1", "--data.qqqqq: unknown; there is allow_other"),
        # what does not go together
        ("--model.heads 3", "--model.heads = 3: does not divide model.hidden = 128; 2 does, with 64 a head"),
        (
            "--phases.0.length 1024",
            "--phases.0.length = 1024: from 8 to 512, the positions of the model (model.positions)",
        ),
        ("--phases.0.length 4", "--phases.0.length = 4: from 8 to 512, the positions of the model (model.positions)"),
        (
            "--phases.0.warmup_steps 120",
            "--phases.0.warmup_steps = 120: the schedule has 120 steps in all (phases.0.steps and phases.1.steps); "
            "give fewer than these",
        ),
        (
            "--phases.1.power 2",
            "--phases.1.power = 2.0: the phase has no learning_rate of its own, so it follows the schedule of the "
            "phase before; remove it, or give phases.1.learning_rate",
        ),
        ("--phases.1.name one", '--phases.1.name = "one": phases.0.name is the same'),
        (
            "--phases []",
            "--phases: is missing: give at least one [[phases]] with name, length, batch, micro_batch, steps and "
            "learning_rate",
        ),
        (
            "--phases.0.batch 100",
            "--phases.0.batch = 100: does not divide by 1 rank x phases.0.micro_batch = 16; "
            "take batch = 96, or micro_batch = 10",
        ),
        # hardware
        (
            "--precision.dtype fp16 --parallel.device cpu",
            '--precision.dtype = "fp16": not on a CPU (parallel.device = "cpu"); '
            'take "bf16", "fp32", or "auto" for the best that there is',
        ),
        (
            "--parallel.offload optimizer --parallel.zero 0",
            '--parallel.offload = "optimizer": needs parallel.zero = 1, 2 or 3; it is 0',
        ),
        (
            "--parallel.offload all",
            '--parallel.offload = "all": weights leave the GPU under parallel.zero = 3 alone; it is 1',
        ),
        (
            "--parallel.offload optimizer --parallel.device cpu",
            '--parallel.offload = "optimizer": a CPU has no other memory to move it to (parallel.device = "cpu"); '
            'take "none"',
        ),
        # DeepSpeed's own
        (
            "--deepspeed.train_batch_size 8",
            "--deepspeed.train_batch_size = 8: follows from the recipe: phases.0.batch; remove it",
        ),
        (
            "--deepspeed.zero_optimization.stage 2",
            "--deepspeed.zero_optimization.stage = 2: follows from the recipe: parallel.zero; remove it",
        ),
        (
            "--deepspeed.zero_optimization.round_robin_gradients",
            "--deepspeed.zero_optimization.round_robin_gradients = true: DeepSpeed mixes up parameters under it; "
            "remove it",
        ),
        # LAMB's
        (
            "--optimizer.trust_all",
            '--optimizer.trust_all = true: is for optimizer.name = "lamb"; it is "adamw"',
        ),
        ("--deepspeed.zero_optimization 2", "--deepspeed.zero_optimization = 2: a table is needed"),
        (
            "--deepspeed.wall_clock_break_down",
            "--deepspeed.wall_clock_break_down = true: unknown; did you mean deepspeed.wall_clock_breakdown?",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_cure(plain: Path, words: str, expected: str) -> None:
    assert faults(plain, *words.split()) == [expected]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            {"lengths": [64, 128]},
            "phases.1.length = 512: the data has 64, 128; make it with shard.py --lengths 512, or take one of these",
        ),
        (
            {"ranks": 8},
            "phases.0.batch = 64: does not divide by 8 ranks x phases.0.micro_batch = 16; "
            "take batch = 128, or micro_batch = 8",
        ),
        (
            {"ranks": 3},
            "phases.1.batch = 32: does not divide by 3 ranks x phases.1.micro_batch = 8; take batch = 24",
        ),
    ],
)
def test_what_is_known_of_the_run_is_checked_too(plain: Path, known: dict[str, Any], expected: str) -> None:
    assert f"{plain}: {expected}" in faults(plain, **known)


def test_a_missing_gpu_is_named(plain: Path) -> None:
    assert faults(plain, "--parallel.device", "cuda", device="cpu") == [
        '--parallel.device = "cuda": no GPU is found here; take "auto" or "cpu", or look at nvidia-smi'
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate = 1e-3", "phases.0.learning_rate: is missing: the highest learning rate"),
        ("batch = 64", "phases.0.batch: is missing: sequences of a step, over all ranks"),
        ("steps = 100", "phases.0.steps: is missing: how long the phase is"),
        ('name = "one"', "phases.0.name: is missing: what logs and checkpoints call it"),
        (
            'size = "tiny"',
            "model.size: is missing: one of tiny, mini, small, medium, base, large; "
            "or give the numbers, model.layers and model.hidden",
        ),
    ],
)
def test_what_is_missing_is_named(plain: Path, line: str, expected: str) -> None:
    assert line in PLAIN
    plain.write_text(PLAIN.replace(line + "\n", "", 1))
    assert faults(plain) == [f"{plain}: {expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = 10\n", "phases.0.share: is missing: the recipe gives steps, and each phase its share of them"),
        ("hours = 1.0\n", "phases.1.share: is missing: the recipe gives hours, and each phase its share of them"),
    ],
)
def test_durations_that_do_not_go_together(plain: Path, text: str, expected: str) -> None:
    plain.write_text(text + PLAIN)
    assert f"{plain}: {expected}" in faults(plain)


def test_shares_make_one(plain: Path) -> None:
    plain.write_text(
        "steps = 1000\n" + PLAIN.replace("steps = 100\n", "share = 0.9\n").replace("steps = 20", "share = 0.2")
    )
    assert faults(plain) == [f"{plain}: phases.0.share = 0.9: the shares of the phases make 1.1; they must make 1"]
    assert load_recipe(plain, ["--phases.1.share", "0.1"]).phase_steps() == (900, 100)


def test_a_share_needs_something_to_be_of(plain: Path) -> None:
    expected = "--phases.0.share = 0.5: of what? give the recipe steps or hours"
    assert faults(plain, "--phases.0.share", "0.5") == [expected]


def test_warmup_steps_do_not_go_by_the_clock(plain: Path) -> None:
    plain.write_text(
        "hours = 1.0\n" + PLAIN.replace("steps = 100\n", "share = 0.9\n").replace("steps = 20", "share = 0.1")
    )
    assert faults(plain, "--phases.0.warmup_steps", "5") == [
        "--phases.0.warmup_steps = 5: the recipe goes by the clock (hours); give phases.0.warmup, a share of the time"
    ]
    assert load_recipe(plain).phase_seconds() == (3240.0, 360.0)
    assert load_recipe(plain).phase_steps() is None


def test_every_mistake_is_reported_at_once(plain: Path) -> None:
    """What cannot be read does not hide what does not go together, nor is blamed for it."""
    plain.write_text(PLAIN.replace("learning_rate = 1e-3", 'learning_rate = "x"') + "\n[precision]\ndtyp = 'fp16'\n")
    words = "--model.heads 3 --nothing.like.it 3 --phases.0.batch x --parallel.zero 0 --parallel.offload all"
    assert faults(plain, *words.split(), lengths=[128]) == [
        f'{plain}: precision.dtyp: unknown; did you mean precision.dtype?',
        '--phases.0.batch = "x": a whole number is needed',
        f'{plain}: phases.0.learning_rate = "x": a number is needed',
        f"--nothing: unknown; there is {', '.join(Recipe.model_fields)}",
        "--model.heads = 3: does not divide model.hidden = 128; 2 does, with 64 a head",
        '--parallel.offload = "all": weights leave the GPU under parallel.zero = 3 alone; it is 0',
        f"{plain}: phases.1.length = 512: the data has 128; make it with shard.py --lengths 512, or take one of these",
    ]  # fmt: skip


def test_a_recipe_that_is_not_there_names_one_that_is(plain: Path) -> None:
    missing = plain.with_name("plane.toml")
    assert faults(missing) == [f"--recipe {missing}: no such file; did you mean {plain}?"]


def test_a_file_that_is_no_toml_is_named(plain: Path) -> None:
    plain.write_text("[model\n")
    [fault] = faults(plain)
    assert fault.startswith(f"--recipe {plain}: cannot be read: ")
    plain.write_bytes(b"\xff\xfe")
    [fault] = faults(plain)
    assert fault.startswith(f"--recipe {plain}: cannot be read: ")


SCRAPS = st.one_of(
    st.none().map(lambda _: {}), st.text(), st.integers(), st.booleans(), st.floats(), st.lists(st.integers())
)


@given(st.dictionaries(st.sampled_from(sorted(known_keys(), key=str)), SCRAPS, min_size=1, max_size=5))
def test_no_scrap_of_a_recipe_gets_past_or_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, scraps: dict[Any, Any]
) -> None:
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


# ---- the arithmetic of a step ----


@given(st.integers(1, 2000), st.integers(1, 200), st.integers(1, 65))
def test_what_does_not_divide_is_refused_with_what_does(batch: int, micro_batch: int, ranks: int) -> None:
    phase = Phase(name="p", length=128, batch=batch, micro_batch=micro_batch)
    together = micro_batch * ranks
    if batch % together == 0:
        assert micro_batches(phase, ranks) == batch // together
        return
    with pytest.raises(UserError) as caught:
        micro_batches(phase, ranks, number=1)
    named = re.search(r"take batch = (\d+)(?:, or micro_batch = (\d+))?$", str(caught.value))
    assert named
    other = int(named[1])
    assert micro_batches(phase.model_copy(update={"batch": other}), ranks) * together == other
    assert abs(other - batch) == min(abs(each - batch) for each in range(together, batch + 2 * together, together))
    if named[2] is None:
        assert batch % ranks
    else:
        smaller = int(named[2])
        assert smaller <= micro_batch
        assert micro_batches(phase.model_copy(update={"micro_batch": smaller}), ranks) * smaller * ranks == batch


def test_sizes_by_numbers() -> None:
    recipe = Recipe.model_validate({"model": {"size": "base", "layers": 6, "positions": 128}})
    shape = recipe.model.shape(30522)
    assert (shape.layers, shape.hidden, shape.heads, shape.intermediate, shape.positions) == (6, 768, 12, 3072, 128)
    shape = Recipe.model_validate({"model": {"layers": 2, "hidden": 96, "heads": 3}}).model.shape(100)
    assert (shape.heads, shape.intermediate, shape.vocabulary) == (3, 384, 100)
