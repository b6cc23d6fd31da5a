"""A small BERT in both worlds, ours and transformers', with weights that all matter to the logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.pretraining_reference import their_config
from torch import Tensor
from transformers import BertForPreTraining

from data_prep.vocabulary.kinds.wordpiece import SPECIAL
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import build_model

SHAPE = Shape(layers=2, hidden=32, heads=2, intermediate=48, vocabulary=99, positions=40)
LETTERS = [chr(number) for number in range(ord("a"), ord("z") + 1)]
PIECES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *(f"word{number}" for number in range(42)))


def our_weights(seed: int = 0, shape: Shape = SHAPE) -> dict[str, Tensor]:
    model = build_model(shape).initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    state = model.state_dict()
    for name in ("embeddings.word.weight", "masked_head.bias"):
        state[name][shape.vocabulary :] = 0
    return state


def their_model(kind: Any = BertForPreTraining, **settings: Any) -> Any:
    model = kind(their_config(SHAPE, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def their_weights() -> dict[str, Tensor]:
    """As they would be saved: without the copy of the decoder."""
    state = {name: weight.detach().clone() for name, weight in their_model().state_dict().items()}
    return {name: weight for name, weight in state.items() if not name.startswith("cls.predictions.decoder.")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the weights of a folder, and saves them as programs of others do: without checksums of other files."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def leave_out_checksums(folder: Path) -> None:
    change_weights(folder, lambda _: None)


def change_config(folder: Path, **values: Any) -> None:
    """Changes a config, of which no checksum is left; None takes a value away."""
    leave_out_checksums(folder)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def with_old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as they were in 2018, with the buffer and the copy that checkpoints of that time have."""
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in state.items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
    return state
