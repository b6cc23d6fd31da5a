"""A plain recipe to be changed, and the faults that a change makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_prep.common.errors import UserError
from pretraining.config.overrides import load_recipe

PLAIN = """
[model]
size = "tiny"

[[phases]]
name = "one"
length = 128
batch = 64
micro_batch = 16
steps = 100
learning_rate = 1e-3
warmup = 0.1

[[phases]]
name = "two"
length = 512
batch = 32
micro_batch = 8
steps = 20
"""

TAKE_WHAT_FITS = ("bert_base", "bert_large", "roberta", "gpt", "modern", "adapt")
"""How the names of our recipes begin whose micro-batches are "auto"; the others are for two CPU cores."""


def write_plain(folder: Path) -> Path:
    path = folder / "plain.toml"
    path.write_text(PLAIN)
    return path


def faults(path: Path, *overrides: str, **known: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides, **known)
    return str(caught.value).splitlines()


def completing(path: Path) -> list[str]:
    """What the command must say besides for a recipe of the house: a model, where the base model gives its sizes."""
    return ["--model.size", "base"] if path.stem == "adapt" else []
