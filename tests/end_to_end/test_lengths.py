"""Card and tokenizer tell the longest text that was trained, in whichever run; a phase may have a length that the data
lacks."""

import json
from pathlib import Path

import pytest
from support.commands import run_main
from support.training import FEW, RECIPE, SEED, Place, assert_same_curve, assert_well, records, train
from transformers import AutoConfig, AutoTokenizer

from data_prep import shard
from data_prep.common.hashing import hash_key
from data_prep.common.toml_text import read_toml
from data_prep.settings import LONGEST, SHORTEST
from data_prep.shards import Manifest
from pretraining import export
from pretraining import train as entry
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.data.corpora import Corpora
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order

POSITIONS = [*FEW, "--model.positions", "128"]


def lengths(folder: Path) -> tuple[int, int]:
    """What the tokenizer lets through, and what the model has positions for; the card says both."""
    length = AutoTokenizer.from_pretrained(folder).model_max_length
    assert f"| longest text it was trained on | {length:,} pieces |" in (folder / "README.md").read_text()
    return length, AutoConfig.from_pretrained(folder).max_position_embeddings


@pytest.mark.slow
def test_the_longest_text_so_far_is_told(place: Place) -> None:
    run, out = place.folder / "run", place.folder / "out"
    place.train(run, *POSITIONS, "--stop-after", "short", ranks=1)
    assert export.main([str(run), "--out", str(out)]) == 0
    assert lengths(out) == (32, 128)
    place.train(run, *POSITIONS, ranks=1)
    assert lengths(run / "export") == (64, 128)
    assert export.main([str(run / "checkpoints/step-00000001"), "--out", str(out), "--replace"]) == 0
    assert lengths(out) == (32, 128)
    for name, source in (("from run", run), ("from folder", run / "export")):
        place.train(name, *POSITIONS, "--phases.1.length", "32", "--init", source, ranks=1)
        assert lengths(place.folder / name / "export") == (64, 128)


def test_examples_and_pieces_seen_are_those_of_the_batches(place: Place, straight: Path) -> None:
    """Counted anew from the shards."""
    manifest, examples, pieces, expected = Manifest.read(place.data), 0, 0, []
    for phase, (length, batch, steps) in enumerate([(32, 24, 5), (64, 12, 3)]):
        dataset = Dataset(Corpora.one(place.data, manifest), length)
        order = BatchOrder(Order(int(hash_key(SEED, phase)[0]), dataset.shard_rows), batch)
        for step in range(steps):
            examples += batch
            pieces += int(dataset.read(order.examples(step)).lengths.sum())
            expected.append((examples, pieces))
    assert [(line["examples_seen"], line["pieces_seen"]) for line in records(straight)] == expected
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_examples_can_have_the_lengths_of_all_recipes() -> None:
    recipes = [path for path in RECIPES.glob("*.toml") if "size =" in path.read_text()]  # not those for any base model
    lengths = {phase.length for path in recipes for phase in load_recipe(path).phases}
    assert 8192 in lengths
    assert all(SHORTEST <= length <= LONGEST for length in lengths)


@pytest.fixture
def shorter(place: Place, tmp_path: Path) -> Place:
    """The recipe of a small run, with phases of 24 and 48 pieces; the data has 32 and 64."""
    recipe = tmp_path / "shorter.toml"
    recipe.write_text(RECIPE.replace("length = 32", "length = 24").replace("length = 64", "length = 48"))
    return Place(place.data, recipe, tmp_path)


@pytest.mark.slow
def test_lengths_that_the_data_lacks_are_trained_and_said_to_be_cut(shorter: Place) -> None:
    """Out of the next longer examples."""
    said = shorter.train("alone", ranks=1)
    for length, longer in ((24, 32), (48, 64)):
        assert f"sequences of length {length}, cut out of examples of {longer}, " in said
    assert len(records(shorter.folder / "alone", "evaluation")) == 2
    card = (shorter.folder / "alone" / "export" / "README.md").read_text()
    trained_with = read_toml(card.rpartition("```toml\n")[2].partition("```")[0])
    assert [(phase["length"], phase["cut_out_of"]) for phase in trained_with["phases"]] == [(24, 32), (48, 64)]
    shorter.train("two")
    assert_same_curve(shorter.folder / "two", shorter.folder / "alone", 1e-4)


@pytest.mark.usefixtures("leaves_group")
def test_the_plan_says_it_too(shorter: Place) -> None:
    printed = run_main(entry.main, "--recipe", shorter.recipe, "--data", shorter.data, "--check")
    assert "24 of 32" in printed
    assert "48 of 64" in printed


@pytest.mark.slow
def test_modern_bert_reads_eight_thousand_pieces(place: Place) -> None:
    """The commands of its recipe, with a small model: shards of both lengths, dynamic masks, both phases, an export."""
    data, run = place.folder / "data", place.folder / "run"
    words = f"--docs {place.data.with_name('data-text')} --out {data} --lengths 1024 8192 --pairs full-sentences"
    words += " --duplicates 1 --tokenizer bytelevel --vocab-size 400 --validation 0.2"
    assert shard.main(words.split()) == 0
    words = f"--recipe modern_base --data {data} --out {run} --logging.every 1"
    words += " --model.layers 3 --model.hidden 32 --model.heads 2 --model.intermediate 48"
    for number in (0, 1):
        words += f" --phases.{number}.steps 2 --phases.{number}.batch 2 --phases.{number}.micro_batch 1"
    words += " --phases.0.warmup_steps 1 --phases.1.decay_steps 1"
    assert_well(train(words.split(), ranks=2))
    assert [record["step"] for record in records(run)] == [1, 2, 3, 4]
    assert lengths(run / "export") == (8192, 8192)
