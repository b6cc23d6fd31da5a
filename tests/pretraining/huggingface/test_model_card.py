"""The model card says how a model came about, with units and without what means nothing; and is a card without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load
from support.recipes import write_plain
from support.records import SCORES
from support.shards import make_shards

from data_prep.shards import Manifest
from pretraining.config.overrides import load_recipe
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
def provenance(manifest: Manifest, tmp_path: Path) -> Provenance:
    """Of a run that is done with both phases of a plain recipe."""
    return Provenance(
        DataSummary.of(manifest),
        load_recipe(write_plain(tmp_path)).as_dict(),
        SCORES.figures(),
        step=120,
        phase=2,
        examples_seen=7040,
        dtype="bf16",
    )


def changed(provenance: Provenance, tmp_path: Path, *overrides: str) -> Provenance:
    """The same with another recipe."""
    return replace(provenance, recipe=load_recipe(write_plain(tmp_path), overrides).as_dict())


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
        "| phase | length | batch | trained for | highest learning rate | warm-up | decay |",
        "| one | 128 pieces | 64 sequences | 100 steps | 0.001 | 10% of the schedule | linear, to 0 |",
        "| two | 512 pieces | 32 sequences | 20 steps | goes on from the phase before |  |  |",
        "- optimizer: AdamW; betas 0.9 and 0.999; epsilon 1e-06; weight decay 0.01, not of biases and norms; bias corr",
        "- precision: bf16; weights are kept and gradients added up in fp32",
        "after step 120, which have seen 7,040 examples.",
        "On 1,000 examples of length 128 held out from training, after step 12,000:",
        "| masked loss | 5.8 nats |",
        "| masked accuracy | 12.0% |",
        "| next-sentence accuracy | 55.0% |",
    ):
        assert part in text, part


def test_no_row_means_nothing(shape: Shape, provenance: Provenance, tmp_path: Path) -> None:
    """Such as the power of a linear decay, the scale of a loss in bf16, LAMB's settings beside AdamW."""
    words = ("power", "loss scale", "trust", "normal", "threads", "keep", "micro", "zero", "guard", "None", "–")
    text = card(shape, provenance)
    assert not [word for word in words if word in text]
    lamb = ["--optimizer.name", "lamb", "--optimizer.normalize", "true", "--optimizer.trust_limits", "[0.01, 10.0]"]
    text = card(shape, changed(provenance, tmp_path, *lamb, "--phases.0.decay", "polynomial", "--phases.0.power", ".5"))
    assert "polynomial, power 0.5, to 0" in text
    assert "LAMB; betas" in text
    assert "trust ratios from 0.01 to 10; gradients divided by their norm" in text
    assert "clipped" not in text


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["--phases.0.decay", "constant", "--phases.0.warmup_steps", "7"], "| 0.001 | 7 steps | constant |"),
        (["--phases.0.decay", "cosine", "--phases.0.final", "0.1"], "| cosine, to 10% of the highest |"),
        (["--phases.0.decay", "wsd"], "| constant, then linear in the last 10%, to 0 |"),
        (["--phases.0.warmup", "0", "--optimizer.clip", "0"], "| 0.001 | none | linear, to 0 |"),
        (["--phases.1.new_positions", "copied"], "| two | 512 pieces, new positions begun as copies |"),
        (["--hours", "2", "--phases.0.share", ".9", "--phases.1.share", ".1"], "| 64 sequences | 90% of 2 hours |"),
        (["--optimizer.bias_correction", "false"], "norms; no bias correction; gradients clipped to a norm of 1"),
    ],
)
def test_every_kind_of_schedule(
    overrides: list[str], part: str, shape: Shape, provenance: Provenance, tmp_path: Path
) -> None:
    assert part in card(shape, changed(provenance, tmp_path, *overrides))


def test_phases_that_did_not_begin_are_not_told(shape: Shape, provenance: Provenance) -> None:
    early = card(shape, replace(provenance, phase=0, phase_step=37, step=37))
    assert "| 37 of 100 steps |" in early
    assert "| two |" not in early
    between = card(shape, replace(provenance, phase=1, phase_step=0, step=100))
    assert "| 100 steps |" in between
    assert "| two |" not in between


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
    text = card(shape, replace(provenance, data=data, scores={}, examples_seen=None, dtype=None))
    assert not {"language", "license", "base_model"} & front(text, tmp_path).keys()
    assert f"{data.pieces:,} pieces of text; 15%" in text
    assert "| licence | not specified |" in text
    assert "## Validation" not in text
    assert "The weights are those after step 120." in text
    assert "precision" not in text


def test_all_examples_are_counted(manifest: Manifest) -> None:
    sets = [entry for entry in manifest.content["sets"] if entry["length"] == 32]
    training, held_out = (sum(e["examples"] for e in sets if e["validation"] == held) for held in (False, True))
    summary = DataSummary.of(manifest)
    assert (summary.examples["32"], summary.examples["32, held out"]) == (training, held_out)


def test_a_manifest_without_a_language_has_none(manifest: Manifest) -> None:
    settings = {name: value for name, value in manifest.content["settings"].items() if name != "language"}
    assert DataSummary.of(Manifest({**manifest.content, "settings": settings})).settings["language"] is None


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
