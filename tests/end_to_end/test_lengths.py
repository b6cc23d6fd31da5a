"""Card and tokenizer tell the longest text that was trained, in whichever run; the config has the positions."""

from __future__ import annotations

import json
from pathlib import Path

from support.training import FEW, SEED, Place, assert_well, records, train
from transformers import AutoConfig, AutoTokenizer

from data_prep.common.hashing import hash_key
from data_prep.shards import Manifest
from pretraining import export
from pretraining.data.dataset import Dataset
from pretraining.data.order import BatchOrder, Order

POSITIONS = [*FEW, "--model.positions", "128"]
SHORT = ["--phases.1.length", "32"]


def lengths(folder: Path) -> tuple[int, int]:
    """What the tokenizer lets through, and what the model has positions for; the card says both."""
    length = AutoTokenizer.from_pretrained(folder).model_max_length
    assert f"| longest text it was trained on | {length} pieces |" in (folder / "README.md").read_text()
    return length, AutoConfig.from_pretrained(folder).max_position_embeddings


def test_the_longest_text_so_far_is_told(place: Place) -> None:
    run, out = place.folder / "run", place.folder / "out"
    assert_well(train(place.command("run", *POSITIONS, "--stop-after", "short"), ranks=1))
    assert export.main([str(run), "--out", str(out)]) == 0
    assert lengths(out) == (32, 128)
    assert_well(train(place.command("run", *POSITIONS), ranks=1))
    assert lengths(run / "export") == (64, 128)
    assert export.main([str(run), "--out", str(out), "--checkpoint", "step-00000001"]) == 0
    assert lengths(out) == (32, 128)
    for name, source in (("from run", run), ("from folder", run / "export")):
        assert_well(train(place.command(name, *POSITIONS, *SHORT, "--init", source), ranks=1))
        assert lengths(place.folder / name / "export") == (64, 128)
    assert_well(train(place.command("short", *POSITIONS, *SHORT), ranks=1))
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
