"""Folders in the forms in which models were published, which older versions of transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import assert_refusal
from support.counterparts import electra_config, gpt_config, modern_config, roberta_config
from transformers import ElectraModel, GPT2Model, ModernBertForMaskedLM, RobertaModel

from pretraining.huggingface.folders import read_folder, read_head


def rewrite_config(folder: Path, leave_out: tuple[str, ...] = (), **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in leave_out}))


def test_gpt_2_without_a_prefix_and_with_masks_among_its_weights(tmp_path: Path) -> None:
    GPT2Model(gpt_config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "wte.weight" in weights
    masks = {"h.0.attn.bias": torch.ones(1, 1, 96, 96), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file({**weights, **masks}, tmp_path / "model.safetensors", {"format": "pt"})
    shape, state, missing = read_folder(tmp_path)
    assert (shape.architecture, shape.learns.objective, missing) == ("gpt", "ltr", ())
    assert torch.equal(state["layers.1.qkv.weight"], weights["h.1.attn.c_attn.weight"].T)


def test_roberta_with_a_pooler_that_nothing_trained(tmp_path: Path) -> None:
    RobertaModel(roberta_config()).save_pretrained(tmp_path)
    shape, state, missing = read_folder(tmp_path)
    assert (shape.architecture, shape.learns.pairs, shape.positions) == ("roberta", False, 96)
    assert {name.partition(".")[0] for name in missing} == {"masked_head"}
    assert not any(name.startswith("pooler") for name in state)


def test_electra_with_embeddings_that_are_narrower_than_its_layers(tmp_path: Path) -> None:
    ElectraModel(electra_config(embedding_size=16)).save_pretrained(tmp_path)
    assert_refusal("embedding_size is 16; only that of the layers, 48, is supported", read_folder, tmp_path)


def test_modernbert_with_its_first_names_of_settings(tmp_path: Path) -> None:
    ModernBertForMaskedLM(modern_config()).save_pretrained(tmp_path)
    wanted = read_folder(tmp_path)[0]
    old = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    rewrite_config(tmp_path, ("layer_types", "rope_parameters"), classifier_pooling="mean", **old)
    assert read_folder(tmp_path)[0] == wanted
    rewrite_config(tmp_path, architectures=["ModernBertForSequenceClassification"])
    assert_refusal("classifier_pooling is 'mean'; only 'cls' is supported", read_head, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 16}, "heads of 3: .*even width"),
        ({"local_attention": 25}, "a window of 25: .*even number"),
        (
            {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
            "layer_types is",
        ),
        ({"norm_bias": True}, "norm_bias is True; only False"),
    ],
)
def test_modernberts_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    ModernBertForMaskedLM(modern_config()).save_pretrained(tmp_path)
    rewrite_config(tmp_path, **changes)
    assert_refusal(message, read_folder, tmp_path)
