"""Fine-tuning recipes: every one that comes with the package loads, and what cannot be is named."""

import re
from pathlib import Path

import pytest
from support.commands import refusal

from finetuning.settings import FORM, FineTuning, load_settings

assert FORM.folder is not None
RECIPES = FORM.folder
OURS = sorted(RECIPES.glob("*.toml"))


def faults(recipe: str | Path, *overrides: str) -> list[str]:
    return refusal(load_settings, recipe, overrides).splitlines()


def test_a_recipe_has_a_name_and_flags_change_it() -> None:
    words = "--search.learning_rates [1e-4,5e-5] --search.seeds=5 --optimizer.bias-correction false"
    settings = load_settings("glue", [*words.split(), "--features.layers", "sum-all"])
    assert settings == load_settings(RECIPES / "glue.toml", [*words.split(), "--features.layers=sum-all"])
    assert (settings.batch, settings.epochs, settings.length) == (32, 3.0, 128)
    assert settings.search.learning_rates == (1e-4, 5e-5)
    assert (settings.search.seeds, settings.optimizer.bias_correction) == (5, False)
    assert settings.features.layers == "sum-all"


def test_there_is_a_recipe_for_every_kind_of_task() -> None:
    names = "demo elmo embeddings glue glue_large gpt miniature ner ner_features own squad1 squad2 swag"
    assert [path.stem for path in OURS] == names.split()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_number_of_a_recipe_has_its_source_and_is_kept(path: Path, tmp_path: Path) -> None:
    """What a run keeps of its recipe reads back the same."""
    lines = path.read_text().splitlines()
    values = [line for line in lines if re.match(r"\w+ = .*\d", line)]
    assert not [line for line in values if " # " not in line]
    legend = " ".join(line for line in lines if line.startswith("#")).lower()
    sources = {source for line in values for source in re.findall(r"# (\w+)", line)} - {"ours"}
    assert not [source for source in sources if f'"{source.lower()}"' not in legend]
    settings, kept = load_settings(path), tmp_path / "recipe.toml"
    kept.write_text(settings.as_toml())
    assert load_settings(kept) == settings


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    """What does not go together is told of values that are right by themselves."""
    mine = tmp_path / "mine.toml"
    mine.write_text("[search]\nlearning_rates = [1e-5, 'x']\nlayer = 1\n")
    words = "--batch-size 8 --spans.max_seq_length 3 --patience -1"
    assert sorted(faults(mine, *words.split())) == [
        "--batch_size: unknown; did you mean batch?",
        "--patience = -1: should be greater than or equal to 0",
        "--spans.max_seq_length: unknown; did you mean length?",
        f"{mine}: search.layer: unknown; did you mean features.layers?",
        f'{mine}: search.learning_rates.1 = "x": should be a valid number',
    ]
    mine.write_text("[parallel]\nzero = 1\n")
    words = "--parallel.offload all --features.hidden 5 --parallel.same_bits true"
    assert faults(mine, *words.split()) == [
        '--parallel.offload = "all": needs parallel.zero = 3; it is 1',
        '--parallel.same_bits = true: not with parallel.offload = "all"; take "none"',
        "--parallel.same_bits = true: is for pre-training; leave it out",
        "--features.hidden = 5: one half is for each direction; take an even number, as 6",
    ]


def test_a_single_value_takes_the_place_of_those_that_a_recipe_searches(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[search]\nlearning_rates = [1e-5, 3e-5]\nbatches = [8, 16]\n")
    settings = load_settings(tmp_path / "mine.toml", ["--learning_rate", "1e-4"])
    assert (settings.learning_rate, settings.search.learning_rates, settings.search.batches) == (1e-4, (), (8, 16))


def test_a_recipe_or_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert faults("gleu")[1] == f"there is {', '.join(path.stem for path in OURS)}"
    refused = refusal(load_settings, "glue", ["--parallel.device", "cuda"], device="cpu")
    assert refused.startswith('--parallel.device = "cuda": no GPU is found here')
    assert load_settings("glue", ["--parallel.device", "cuda"]) != FineTuning()
