"""The model card says how a model came about, with units and without what means nothing; and is a card without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load
from support.records import SCORES
from support.shards import make_shards

from data_prep.shards import Manifest, RecordedSettings
from pretraining.huggingface.model_card import BaseSummary, DataSummary, Provenance, model_card
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import num_parameters


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.read(make_shards(tmp_path_factory.mktemp("data") / "shards", documents=50))


@pytest.fixture
def shape(manifest: Manifest) -> Shape:
    return Shape(2, 32, 2, 48, manifest.vocabulary_size, positions=64)


@pytest.fixture
def provenance(manifest: Manifest) -> Provenance:
    """Of a run that is done with both phases of a plain recipe."""
    return Provenance(
        DataSummary.of(manifest),
        "seed = 7\n",
        SCORES.figures(),
        step=120,
        examples_seen=7040,
        dtype="bf16",
        optimizer="AdamW; betas 0.9 and 0.999",
        scored_length=32,
    )


def card(shape: Shape, provenance: Provenance | None = None, **more: Any) -> str:
    return model_card(shape, **{"folder": Path("runs/mine/export"), "length": 64, "provenance": provenance, **more})


def front(text: str, folder: Path) -> dict[str, Any]:
    """What the hub reads, by its own code."""
    (folder / "README.md").write_text(text)
    return metadata_load(folder / "README.md") or {}


def test_the_hub_reads_what_it_wants_to_know(shape: Shape, provenance: Provenance, tmp_path: Path) -> None:
    text = card(shape, replace(provenance, base=BaseSummary("somebody/bert-base", on_hub=True)), licence="cc-by-sa-4.0")
    assert front(text, tmp_path) == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "fill-mask"],
        "license": "cc-by-sa-4.0",
        "base_model": "somebody/bert-base",
    }
    assert "began with the weights of somebody/bert-base." in text
    assert "| licence | cc-by-sa-4.0 |" in text


def test_the_card_says_how_the_model_came_about(shape: Shape, provenance: Provenance) -> None:
    data = replace(provenance.data, settings={**provenance.data.settings, "language": "de"})
    text = card(shape, replace(provenance, data=data))
    for part in (
        f"| parameters | {num_parameters(shape):,} |",
        "| shards-text | 50 |",
        f"{data.pieces:,} pieces of text in `de`; 15% of the pieces masked, single pieces, 2 times anew; pairs of segm",
        f"| 32 pieces | {data.examples['32']:,} | {data.examples['32, held out']:,} |",
        f"`{data.fingerprint}`",
        "- optimizer: AdamW; betas 0.9 and 0.999",
        "```toml\nseed = 7\n```",
        "- precision: bf16; weights are kept and gradients added up in fp32",
        "after step 120, which have seen 7,040 examples.",
        "On 1,000 examples of length 32 held out from training, after step 12,000:",
        "| masked loss | 5.8 nats |",
        "| masked accuracy | 12.0% |",
        "| next-sentence accuracy | 55.0% |",
    ):
        assert part in text, part


def test_a_length_below_the_positions_is_told(shape: Shape, provenance: Provenance) -> None:
    assert "| positions | 64 |" in card(shape, provenance)
    text = card(shape, provenance, length=32)
    assert "| positions | 64, of which 32 were trained |" in text
    assert "cuts texts at 32 pieces" in text


def test_the_command_that_loads_it_fits_the_heads_and_the_place(shape: Shape, provenance: Provenance) -> None:
    assert 'AutoModelForPreTraining.from_pretrained("runs/mine/export")' in card(shape)
    alone = card(replace(shape, pairs=False), replace(provenance, segments=1), folder=Path("/home/me/mine"))
    assert 'AutoModelForMaskedLM.from_pretrained("mine")' in alone
    assert "(`token_type_ids` of 1) was never trained, and has the embedding of the first" in alone
    assert "/home" not in alone


def test_what_was_not_given_is_not_told(shape: Shape, provenance: Provenance, tmp_path: Path) -> None:
    data = replace(provenance.data, settings={**provenance.data.settings, "language": None})
    text = card(shape, replace(provenance, data=data, scores={}))
    assert not {"language", "license", "base_model"} & front(text, tmp_path).keys()
    assert f"{data.pieces:,} pieces of text; 15%" in text
    assert "| licence | not specified |" in text
    assert "## Validation" not in text


def test_all_examples_are_counted(manifest: Manifest) -> None:
    sets = [entry for entry in manifest.figures if entry.length == 32]
    training, held_out = (sum(e.examples for e in sets if e.validation == held) for held in (False, True))
    summary = DataSummary.of(manifest)
    assert (summary.examples["32"], summary.examples["32, held out"]) == (training, held_out)


def test_a_manifest_without_a_language_has_none(manifest: Manifest) -> None:
    settings = {name: value for name, value in manifest.settings if name != "language"}
    other = manifest.model_copy(update={"settings": RecordedSettings(**settings)})
    assert DataSummary.of(other).settings["language"] is None


def test_a_card_of_nothing_known_is_still_a_card(shape: Shape, tmp_path: Path) -> None:
    text = card(shape, length=32)
    assert front(text, tmp_path)["tags"] == ["bert", "fill-mask"]
    assert "64, of which 32 were used by the tokenizer" in text
    assert "## Data" not in text
    assert "pre-trained with Cloze" not in text


def test_names_from_outside_do_not_break_the_card(shape: Shape, provenance: Provenance, tmp_path: Path) -> None:
    data = replace(provenance.data, sources={"a|b\n# c": 3}, settings={"language": "no"})
    text = card(shape, replace(provenance, data=data, base=BaseSummary("folder: [x]\n---\n# y", on_hub=False)))
    assert "| a\\|b # c | 3 |" in text
    found = front(text, tmp_path)
    assert found["language"] == "no"
    assert "base_model" not in found
    assert "weights of folder: [x] --- # y." in text
