"""Fills a recipe with the sizes of its base model, and with its dropout if the recipe gives none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data_prep.common.errors import UserError
from data_prep.common.toml_text import Key
from pretraining.config.settings import Model
from pretraining.model.shape import SIZES, Shape

FindShape = Callable[[str], Shape]
"""Finds the sizes of a model by its folder or name, or raises UserError."""
FREE = ("dropout", "attention_dropout")
"""Settings that may differ from those of the base model."""
KEY = "base_model"


def take_over(raw: dict[str, Any], find_shape: FindShape) -> dict[Key, str]:
    """Fills the model of a raw recipe with the sizes of its base model, if it names one.

    Returns faults by key, each as the text that follows the key in a message.
    """
    name, model = raw.get(KEY), raw.setdefault("model", {})
    if not isinstance(name, str) or not name or not isinstance(model, dict):
        return {}  # no base model, or a fault that is reported elsewhere
    try:
        sizes = list_sizes(find_shape(name))
    except UserError as error:
        raw["model"] = {**model, "size": "tiny"}  # so that all else can be checked
        return {(KEY,): f" {error}"}
    faults = dict(_find_differences(model, sizes, name))
    for setting, value in sizes.items():
        if ("model", setting) in faults:
            model[setting] = value
        model.setdefault(setting, value)
    return faults


def list_sizes(shape: Shape) -> dict[str, float]:
    """Lists the model settings of a recipe for this shape."""
    return {name: getattr(shape, name) for name in Model.model_fields if name != "size"}


def _find_differences(model: Mapping[str, Any], sizes: Mapping[str, float], base: str) -> Iterator[tuple[Key, str]]:
    """Finds sizes in a recipe that differ from those of its base model; more positions are allowed."""
    for setting, theirs in sizes.items():
        given = model.get(setting, theirs)
        if setting in FREE or not isinstance(given, int | float) or given == theirs:
            continue
        if setting != "positions":
            yield ("model", setting), f" = {given}: {base} has {theirs}; leave it out (see --recipe adapt)"
        elif given < theirs:
            yield ("model", setting), f" = {given}: {base} has {theirs}; leave it out, or give more, which begin anew"
    size = model.get("size")
    if size in SIZES:
        layers, hidden = SIZES[size]
        if (model.get("layers", layers), model.get("hidden", hidden)) != (sizes["layers"], sizes["hidden"]):
            there = f"{sizes['layers']} layers of {sizes['hidden']}"
            yield (
                ("model", "size"),
                f' = "{size}": {layers} layers of {hidden}, but {base} has {there}; leave it out (see --recipe adapt)',
            )
