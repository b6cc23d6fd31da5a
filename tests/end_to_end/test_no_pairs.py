"""Data without pairs: nothing of next sentences is trained, told or exported, from shard.py to transformers."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.marks import slow
from support.training import FEW, Place, assert_refused, exported_weights, records, state, stopped_at, their_losses
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretraining.checkpoint.models import StoredModel

LOGS = ["--logging.every", "2", "--evaluation.every", "3", "--checkpoints.keep", "9", "--logging.tensorboard", "true"]
SEGMENTS = "bert.embeddings.token_type_embeddings.weight"
TRACES = re.compile(r"next|sentence|nsp|pooler|seq_relationship", re.IGNORECASE)
"""what would tell of next-sentence prediction"""


@pytest.fixture(scope="module")
def unpaired(shared: Place, unpaired_data: Path) -> Place:
    """Shards without pairs, and "straight", a run on them."""
    place = dataclasses.replace(shared, data=unpaired_data, folder=shared.folder / "unpaired runs")
    said = place.train("straight", *LOGS, ranks=1)
    (place.folder / "said").write_text(said)
    return place


def test_nothing_tells_of_next_sentences(unpaired: Place) -> None:
    """The second segment, which was never trained, is the first."""
    run = unpaired.folder / "straight"
    said = (unpaired.folder / "said").read_text()
    assert "the data has no pairs: the model learns from masked pieces alone" in said
    for text in (said, (run / "metrics.jsonl").read_text(), (run / "export" / "config.json").read_text()):
        assert not TRACES.search(text), TRACES.search(text)
    card = " ".join((run / "export" / "README.md").read_text().split())
    assert set(TRACES.findall(card)) == {"pooler"}
    for told in ('pairs = "none"', "no trained pooler", "was never trained, and has the embedding of the first"):
        assert told in card
    events = EventAccumulator(str(run))
    events.Reload()
    assert not [name for name in events.Tags()["scalars"] if TRACES.search(name)]
    assert not [name for name in state(run) if TRACES.search(name)]
    assert all(record["loss"] == record["masked_loss"] for record in records(run))
    first, second = exported_weights(run)[SEGMENTS]
    assert torch.equal(first, second)


def test_transformers_loads_a_masked_language_model(unpaired: Place) -> None:
    """With nothing missing or left over, and it scores what the run said."""
    folder = unpaired.folder / "straight" / "export"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    kind: Any = transformers.BertForMaskedLM
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    [loss] = their_losses(model, unpaired.data)
    assert loss == pytest.approx(records(folder.parent, "evaluation")[-1]["masked_loss"], abs=1e-3)


@pytest.mark.parametrize("segments", [2, slow(1)])
def test_one_word_leaves_next_sentences_out(place: Place, segments: int) -> None:
    """The very pairs are read; the second segment is trained as ever, unless the model has one alone."""
    words = ["--objective.next_sentences", "false", "--model.segments", segments]
    said = place.train("run", *words, ranks=1)
    assert "next sentences are left out: the model learns from masked pieces alone" in said
    assert "logits read back by Cloze and" in said
    run = place.folder / "run"
    assert not TRACES.search((run / "metrics.jsonl").read_text())
    assert json.loads((run / "export" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    rows, encoder = exported_weights(run)[SEGMENTS], StoredModel.open(str(run)).encoder  # as fine-tuning begins with it
    assert len(rows) == len(encoder["embeddings.segment.weight"]) == segments
    assert segments == 1 or not torch.equal(rows[0], rows[1])
    assert not [name for name in encoder if "pooler" in name]
    card = (run / "export" / "README.md").read_text()
    assert "next_sentences = false" in card
    assert "no trained pooler" in card
    assert "embedding of the first" not in card


STILL = [*FEW, "--phases.0.learning_rate", "1e-30"]


def test_heads_that_the_data_cannot_train_are_left_out_and_said(unpaired: Place, place: Place, straight: Path) -> None:
    """The embedding of the second segment is kept."""
    said = dataclasses.replace(unpaired, folder=place.folder).train("run", "--init", straight, *STILL, ranks=1)
    assert f"begins with {straight}: " in said
    assert "; left out: pooler, next-sentence head\n" in said
    before, after = exported_weights(straight), exported_weights(place.folder / "run")
    assert set(before) - set(after) == {name for name in before if TRACES.search(name)}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert "never trained" not in (place.folder / "run" / "export" / "README.md").read_text()


def test_a_run_with_both_heads_goes_on_in_a_new_folder(unpaired: Place, place: Place, straight: Path) -> None:
    run = stopped_at(straight, place.folder / "run", 6)
    given = dataclasses.replace(unpaired, folder=place.folder).command("new", "--branch", run)
    errors = assert_refused(given, "  the head for next sentences was True, now False\n")
    assert errors.endswith("undo these, or name a new folder\n")
