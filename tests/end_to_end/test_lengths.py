"""Card and tokenizer tell the longest text that was trained, in whichever run; the config has the positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.training import FEW, SEED, Place, assert_well, records, train
from transformers import AutoConfig, AutoTokenizer

from data_prep import shard
from data_prep.common.hashing import hash_key
from data_prep.settings import LONGEST, SHORTEST
from data_prep.shards import Manifest
from pretraining import export
from pretraining.config.overrides import RECIPES, load_recipe
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order

POSITIONS = [*FEW, "--model.positions", "128"]
SHORT = ["--phases.1.length", "32"]


def lengths(folder: Path) -> tuple[int, int]:
    """What the tokenizer lets through, and what the model has positions for; the card says both."""
    length = AutoTokenizer.from_pretrained(folder).model_max_length
    assert f"| longest text it was trained on | {length:,} pieces |" in (folder / "README.md").read_text()
    return length, AutoConfig.from_pretrained(folder).max_position_embeddings


@pytest.mark.slow
def test_the_longest_text_so_far_is_told(place: Place) -> None:
    run, out = place.folder / "run", place.folder / "out"
    place.train("run", *POSITIONS, "--stop-after", "short", ranks=1)
    assert export.main([str(run), "--out", str(out)]) == 0
    assert lengths(out) == (32, 128)
    place.train("run", *POSITIONS, ranks=1)
    assert lengths(run / "export") == (64, 128)
    assert export.main([str(run), "--out", str(out), "--checkpoint", "step-00000001"]) == 0
    assert lengths(out) == (32, 128)
    for name, source in (("from run", run), ("from folder", run / "export")):
        place.train(name, *POSITIONS, *SHORT, "--init", source, ranks=1)
        assert lengths(place.folder / name / "export") == (64, 128)
    place.train("short", *POSITIONS, *SHORT, ranks=1)
    assert lengths(place.folder / "short" / "export") == (32, 128)


def test_examples_and_pieces_seen_are_those_of_the_batches(place: Place, straight: Path) -> None:
    """Counted anew from the shards."""
    manifest, examples, pieces, expected = Manifest.read(place.data), 0, 0, []
    for phase, (length, batch, steps) in enumerate([(32, 24, 5), (64, 12, 3)]):
        dataset = Dataset(place.data, manifest, length)
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


@pytest.mark.slow
def test_modern_bert_reads_eight_thousand_pieces(place: Place) -> None:
    """The commands of its recipe, with a small model: shards of both lengths, dynamic masks, both phases, an export."""
    data = place.folder / "data"
    words = ["--docs", str(place.data.with_name("data-text")), "--out", str(data), "--lengths", "1024", "8192"]
    words += ["--pairs", "full-sentences", "--short-probability", "0", "--duplicates", "1"]
    assert shard.main([*words, "--tokenizer", "bytelevel", "--vocab-size", "400", "--validation", "0.2"]) == 0
    small = {"layers": 3, "hidden": 32, "heads": 2, "intermediate": 48}
    sizes = [word for name, size in small.items() for word in (f"--model.{name}", str(size))]
    given = {"steps": (2, 2), "batch": (2, 2), "micro_batch": (1, 1), "warmup_steps": (1,), "decay_steps": (None, 1)}
    phases = [
        word
        for name, values in given.items()
        for number, value in enumerate(values)
        if value is not None
        for word in (f"--phases.{number}.{name}", str(value))
    ]
    places = ["--data", str(data), "--out", str(place.folder / "run")]
    command = ["--recipe", "modern_base", *places, *sizes, *phases]
    assert_well(train([*command, "--logging.every", "1"], ranks=2))
    assert [record["step"] for record in records(place.folder / "run")] == [1, 2, 3, 4]
    assert lengths(place.folder / "run/export") == (8192, 8192)
