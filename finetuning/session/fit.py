"""Checks that models and settings fit together: refuses what cannot work, and lists doubts."""

from __future__ import annotations

from pathlib import Path

from data_prep.common.errors import UserError
from finetuning.model.features import LAST_FOUR
from finetuning.running.folders import has_no_class
from finetuning.settings import FineTuning
from pretraining.checkpoint.models import StoredModel


def refuse_without_class(name: str | None) -> None:
    """Refuses a `--model` with a BiLSTM, which can be asked but not trained further or scored again."""
    if name is not None and has_no_class(Path(name)):
        raise UserError(
            f"--model {name}: a model with a BiLSTM is scored in its own training; predict.py asks it more, and "
            "nothing begins with it: name the model that it was trained on"
        )


def require_fit(settings: FineTuning, model: StoredModel, backward: StoredModel | None, from_scratch: bool) -> None:
    """Refuses settings that the model cannot fulfil, and a second model that does not match it."""
    _require_room(settings, model)
    if backward is not None:
        _require_room(settings, backward)
        _require_beside(settings, model, backward)
    if settings.language_loss:
        _require_language(model, from_scratch)


def _require_room(settings: FineTuning, model: StoredModel) -> None:
    """Refuses more positions or layers than the model has."""
    name, shape, layers = model.name, model.shape, settings.features.layers
    if settings.length > (most := shape.positions):
        raise UserError(f"length = {settings.length}: {name} has {most} positions; take --length {most}")
    if layers.endswith("last-four") and shape.layers < LAST_FOUR:
        raise UserError(f"features.layers = {layers}: {name} has {shape.layers} layers; take last or weighted-all")


def _require_beside(settings: FineTuning, model: StoredModel, backward: StoredModel) -> None:
    """Refuses a second model whose features cannot be concatenated with those of the first, layer by layer."""
    flag = f"--backward {backward.name}"
    if not settings.features.layers:
        raise UserError(f"{flag}: stands beside another model as frozen features; add --features.layers mix")
    if model.vocabulary.sha256 != backward.vocabulary.sha256:
        raise UserError(
            f"{flag}: has another vocabulary than {model.name}, so that pieces are not the same; name two models that "
            "were trained on the same shards"
        )
    layers, of_first = backward.shape.layers, model.shape.layers
    if layers != of_first:
        raise UserError(f"{flag}: has {layers} layers, {model.name} has {of_first}; name two of as many")


def _require_language(model: StoredModel, from_scratch: bool) -> None:
    """Refuses a language loss for a model that sees the pieces it predicts, or has no language head."""
    if model.shape.learns.sees != "before":
        raise UserError(
            f"language_loss: a piece of {model.name} sees those after it, which are to be predicted; name a model that "
            "was pre-trained with --objective.name ltr, or leave language_loss out"
        )
    if not from_scratch and not model.language_head:
        raise UserError(
            f"language_loss: {model.name} has no language head; name the run or the export of its pre-training, or "
            "leave language_loss out"
        )


def list_doubts_of_fit(settings: FineTuning, model: StoredModel, backward: StoredModel | None) -> list[str]:
    """Lists doubts for the user: sequences longer than in pre-training, or models of unusual direction."""
    found, longest = [], model.trained
    if settings.length > longest:
        found.append(
            f"{model.name}: was trained on texts of {longest} pieces at most; longer ones, up to --length "
            f"{settings.length}, have positions that it knows nothing of"
        )
    for one, usual in ((model, "before"), (backward, "after")) if backward is not None else ():
        if one is not None and one.shape.learns.sees != usual:
            sees = "on both sides of it" if one.shape.learns.sees == "both" else f"{one.shape.learns.sees} it"
            usually = f"usual beside another model is one that sees those {usual} it"
            found.append(f"{one.name}: a piece sees those {sees}; {usually}")
    return found
