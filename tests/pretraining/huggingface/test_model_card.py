"""The model card says how a model came about, and is a card where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml  # type: ignore[import-untyped]
from support.shards import make_shards

from data_prep.shards import Manifest
from pretraining.huggingface.model_card import DataSummary, Provenance, model_card
from pretraining.model.shape import Shape

RECIPE = {
    "seed": 7,
    "optimizer": {"name": "lamb", "decay": 0.01, "betas": (0.9, 0.999)},
    "phases": [
        {"length": 128, "batch": 65536, "steps": 7038, "learning_rate": 6e-3},
        {"length": 512, "batch": 32768, "steps": 1563, "learning_rate": 4e-3, "warmup": 0.128},
    ],
}
METRICS = {"masked loss": 2.34567, "next accuracy": 0.981}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.read(make_shards(tmp_path_factory.mktemp("data") / "shards", documents=50))


@pytest.fixture
def shape(manifest: Manifest) -> Shape:
    return Shape(2, 32, 2, 48, manifest.vocabulary_size, positions=64)


def test_the_card_says_how_the_model_came_about(manifest: Manifest, shape: Shape) -> None:
    card = model_card(shape, Provenance(DataSummary.of(manifest), RECIPE, METRICS, 8601))
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "fill-mask"],
    }
    assert f"{shape.num_parameters():,} parameters" in text
    assert f"`{manifest.fingerprint}`" in text
    assert "| shards-text | 50 |" in text
    assert "| phase | length | batch | steps | learning rate | warmup |" in text
    assert "| 1 | 128 | 65,536 | 7,038 | 0.006 | – |" in text
    assert "| 2 | 512 | 32,768 | 1,563 | 0.004 | 0.128 |" in text
    assert "- optimizer: name lamb, decay 0.01, betas 0.9 0.999" in text
    assert "| masked loss | 2.346 |" in text
    assert "after step 8,601" in text


def test_all_examples_are_counted(manifest: Manifest) -> None:
    sets = [entry for entry in manifest.content["sets"] if entry["length"] == 32]
    training, held_out = (sum(e["examples"] for e in sets if e["validation"] == held) for held in (False, True))
    summary = DataSummary.of(manifest)
    assert (summary.examples["32"], summary.examples["32, held out"]) == (training, held_out)


def test_a_card_of_nothing_known_is_still_a_card(shape: Shape) -> None:
    card = model_card(shape)
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["bert", "fill-mask"]
    assert "## Data" not in card
    assert "pre-trained with Cloze" not in card


def test_names_from_outside_do_not_break_the_card(manifest: Manifest, shape: Shape) -> None:
    summary = replace(DataSummary.of(manifest), sources={"a|b\n# c": 3}, settings={"language": "no"})
    card = model_card(shape, Provenance(summary, RECIPE, {}, 1))
    assert "| a\\|b # c | 3 |" in card
    assert yaml.safe_load(card.split("---\n")[1])["language"] == "no"
