"""Data without pairs: nothing of next sentences is trained, told or exported, from shard.py to transformers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.pretraining_reference import pad_batch
from support.training import (
    FEW,
    Place,
    assert_ended,
    assert_well,
    exported_weights,
    launch,
    records,
    state,
    stopped_at,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data_prep.shards import Manifest
from pretraining import export
from pretraining.checkpoint.models import StoredModel
from pretraining.data.batches import validation_batches
from pretraining.data.dataset import Dataset

LOGS = ["--logging.every", "2", "--evaluation.every", "3", "--checkpoints.keep", "9", "--logging.tensorboard", "true"]
TRACES = re.compile(r"next|sentence|nsp|pooler|seq_relationship", re.IGNORECASE)
"""what would tell of next-sentence prediction"""


@pytest.fixture(scope="module")
def unpaired(shared: Place, unpaired_data: Path) -> Place:
    """Shards without pairs, and "straight", a run of two ranks on them."""
    place = dataclasses.replace(shared, data=unpaired_data, folder=shared.folder / "unpaired runs")
    said = assert_well(train(place.command("straight", *LOGS)))
    (place.folder / "said").write_text(said)
    return place


def test_nothing_tells_of_next_sentences(unpaired: Place) -> None:
    run = unpaired.folder / "straight"
    said = (unpaired.folder / "said").read_text()
    assert "the data has no pairs: the model learns from masked pieces alone" in said
    for text in (said, (run / "metrics.jsonl").read_text(), (run / "export" / "config.json").read_text()):
        assert not TRACES.search(text), TRACES.search(text)
    card = (run / "export" / "README.md").read_text()
    assert set(TRACES.findall(card)) == {"pooler"}
    assert 'pairs = "none"' in card
    assert "no trained pooler" in card
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert not [name for name in events.Tags()["scalars"] if TRACES.search(name)]
    assert not [name for name in state(run) if TRACES.search(name)]
    assert all(record["loss"] == record["masked_loss"] for record in records(run))


def test_one_word_leaves_next_sentences_out(place: Place) -> None:
    """The very pairs are read, of which the second segment is trained as ever."""
    said = assert_well(train(place.command("run", "--objective.next_sentences", "false"), ranks=1))
    assert "next sentences are left out: the model learns from masked pieces alone" in said
    run = place.folder / "run"
    assert not TRACES.search((run / "metrics.jsonl").read_text())
    assert json.loads((run / "export" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    rows = exported_weights(run)["bert.embeddings.token_type_embeddings.weight"]
    assert not torch.equal(rows[0], rows[1])
    card = (run / "export" / "README.md").read_text()
    assert "next_sentences = false" in card
    encoder = StoredModel.open(str(run)).encoder  # as fine-tuning begins with it: both segments, and no pooler
    assert len(encoder["embeddings.segment.weight"]) == 2
    assert not [name for name in encoder if "pooler" in name]
    assert "no trained pooler" in card


@pytest.mark.slow
def test_a_model_of_one_segment_reads_pairs(place: Place) -> None:
    words = ["--objective.next_sentences", "false", "--model.segments", "1"]
    assert "logits read back by Cloze and" in assert_well(train(place.command("run", *words), ranks=1))
    assert len(exported_weights(place.folder / "run")["bert.embeddings.token_type_embeddings.weight"]) == 1
    assert "embedding of the first" not in (place.folder / "run" / "export" / "README.md").read_text()


def test_transformers_loads_a_masked_language_model(unpaired: Place, place: Place) -> None:
    """With nothing missing or left over, and it scores what the run said; the second segment is the first."""
    out = place.folder / "exported"
    assert export.main([str(unpaired.folder / "straight"), "--out", str(out)]) == 0
    for folder in (out, unpaired.folder / "straight" / "export"):
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
        kind: Any = transformers.BertForMaskedLM
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert their_masked_loss(model.eval(), unpaired.data) == pytest.approx(
            records(unpaired.folder / "straight", "evaluation")[-1]["masked_loss"], abs=1e-3
        )
    rows = exported_weights(unpaired.folder / "straight")["bert.embeddings.token_type_embeddings.weight"]
    assert len(rows) == 2
    assert torch.equal(rows[0], rows[1])
    assert "was never trained, and has the embedding of the first" in " ".join((out / "README.md").read_text().split())


def their_masked_loss(model: Any, data: Path) -> float:
    """By transformers, on the examples that the run was scored on."""
    total, predictions = 0.0, 0
    dataset = Dataset(data, Manifest.read(data), 64, validation=True)
    for batch, _ in validation_batches(dataset, 0, 1, 32, limit=25):
        given = pad_batch(batch)
        labels, _ = given.pop("labels"), given.pop("next_sentence_label")
        with torch.no_grad():
            logits = model(**given).logits
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        predictions += len(batch.labels)
    return total / predictions


def test_heads_that_the_data_cannot_train_are_left_out_and_said(unpaired: Place, place: Place, straight: Path) -> None:
    """From a run with both heads, and from its exported folder; the embedding of the second segment is kept."""
    still = [*FEW, "--phases.0.learning_rate", "1e-30"]
    before = exported_weights(straight)
    for name, source in (("run", straight), ("folder", straight / "export")):
        given = dataclasses.replace(unpaired, folder=place.folder).command(name, "--init", source, *still)
        said = assert_well(train(given, ranks=1))
        assert f"begins with {source}: " in said
        assert "; left out: pooler, next-sentence head\n" in said
        after = exported_weights(place.folder / name)
        assert set(before) - set(after) == {name for name in before if TRACES.search(name)}
        assert all(torch.equal(after[name], before[name]) for name in after)
        assert "never trained" not in (place.folder / name / "export" / "README.md").read_text()


def test_a_run_with_both_heads_goes_on_in_a_new_folder(unpaired: Place, place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 6)
    given = dataclasses.replace(unpaired, folder=place.folder).command("run", "--data.allow_other", "true")
    errors = assert_ended(launch(given), 2, "  the head for next sentences was True, now False\nto start a new run ")
    assert errors.endswith(f": --init {run} --out NEW\n")


@pytest.mark.slow
def test_heads_begin_anew_where_there_are_pairs(unpaired: Place, place: Place) -> None:
    source = unpaired.folder / "straight"
    for name, given in (("run", source), ("folder", source / "export")):
        assert_well(train(place.command(name, "--init", given, *FEW, "--phases.0.learning_rate", "1e-30"), ranks=1))
        after, before = exported_weights(place.folder / name), exported_weights(source)
        assert all(torch.equal(after[weight], before[weight]) for weight in before)
        assert records(place.folder / name)[-1]["next_loss"] == pytest.approx(0.69, abs=0.05)
