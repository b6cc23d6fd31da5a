"""What may change between two starts of a run: a recipe that cannot go on is refused, and all else is told."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep.common.errors import UserError
from pretraining.checkpoint.record import CheckpointRecord
from pretraining.config.settings import Recipe
from pretraining.engine.engine import Engine
from pretraining.engine.precision import name_dtype
from pretraining.training.exporting import EXPORT
from pretraining.training.request import Context, Request
from pretraining.training.state import RunRecord

Change = tuple[str, Any, Any]
"""A setting, what it was, and what it is now."""
HOW = ("data", "parallel", "compute", "evaluation", "logging", "checkpoints", "guards", "deepspeed")
"""Sections of a recipe that say how a run is done, and not what is trained."""
NOT_SET = "not set"
CARD_LICENCE = "card.licence"


def is_trained(run: RunRecord) -> bool:
    """Whether all phases of a run's own recipe are trained."""
    return run.state.phase >= len(run.recipe["phases"])


def require_continuation(record: CheckpointRecord, request: Request) -> None:
    """Refuses what a run cannot be continued with, and what asks a finished run for more."""
    run = RunRecord.of(record)
    recipe, before = request.recipe, recipe_of(run, request.out)
    require_vocabulary(run, request)
    if is_trained(run):
        if changes := [*data_changes(run, request), *changes_of_training(before, recipe)]:
            cure = _cure(record, run, request, changes)
            raise UserError(_told(f"--out {request.out}: is trained to its end", changes, cure))
        return
    settings: list[Change] = [
        ("base_model", before.base_model or "none", recipe.base_model or "none"),
        *record.shape.differences(request.shape),
        ("optimizer.name", before.optimizer.name, recipe.optimizer.name),
        ("the phases", _names(before), _names(recipe)),
        *lengths_of_done_phases(run.state.phase, before, recipe),
    ]
    if run.state.phase_step and run.state.phase < len(recipe.phases):  # in a phase, the order of the data stays
        settings.append(("seed", before.seed, recipe.seed))
        for name in ("length", "batch"):
            then, now = (getattr(either.phases[run.state.phase], name) for either in (before, recipe))
            settings.append((f"phases.{run.state.phase}.{name}", then, now))
    if changes := [change for change in settings if change[1] != change[2]]:
        cure = "give what was, or name a new folder"
        raise UserError(_told(f"--out {request.out}: cannot go on with this recipe", changes, cure))


def require_vocabulary(run: RunRecord, request: Request) -> None:
    """Refuses data with other pieces, or other casing: the weights mean nothing to them, whatever is allowed."""
    if run.data.vocabulary != request.manifest.content["vocabulary"]["sha256"] and not is_trained(run):
        raise UserError(
            f"--data {request.data}: has another vocabulary than {request.out} was trained with; "
            f"make it with shard.py --vocab {request.out}, or name a new folder"
        )


def with_what_is_kept(recipe: Recipe, run: RunRecord) -> Recipe:
    """The recipe with what a run keeps of its first start where a later one does not name it: the model that it began
    with, and its licence."""
    kept = run.recipe.get("base_model") if recipe.base_model is None else recipe.base_model
    licence = run.recipe.get("card", {}).get("licence") if recipe.card.licence is None else recipe.card.licence
    card = recipe.card.model_copy(update={"licence": licence})
    return recipe.model_copy(update={"base_model": kept, "card": card})


def recipe_of(run: RunRecord, folder: Path) -> Recipe:
    """The recipe that a run has been trained by."""
    try:
        return Recipe.model_validate(run.recipe)
    except ValidationError as error:
        raise UserError(f"--out {folder}: was trained by another version of this program: {error}") from error


def data_changes(run: RunRecord, request: Request) -> list[Change]:
    """Whether the data is other than the run's last."""
    then, now = run.data.fingerprint, request.manifest.fingerprint
    return [] if then == now else [("the fingerprint of the data", then[:12], now[:12])]


def changes_of_training(before: Recipe, recipe: Recipe) -> list[Change]:
    """Lists all that makes a recipe another training, and not the same one done in another way."""
    changes = differing(before.as_dict(), recipe.as_dict())
    return [change for change in changes if _section(change[0]) not in HOW and not change[0].endswith(".micro_batch")]


def lengths_of_done_phases(done: int, before: Recipe, recipe: Recipe) -> Iterator[Change]:
    """Compares how long the phases are that the run has behind it: they are not trained again."""
    for number in range(min(done, len(recipe.phases))):
        given = before.phases[number].steps is not None and recipe.phases[number].steps is not None
        name = f"phases.{number}.steps" if given else f"the length of phases.{number}"
        yield f"{name} (which is done)", _length(before, number), _length(recipe, number)


def _length(recipe: Recipe, number: int) -> str:
    steps, seconds = recipe.phase_steps(), recipe.phase_seconds()
    if steps is not None:
        return f"{steps[number]}"
    return f"{seconds[number] / 3600:g} hours" if seconds is not None else "not known"


def _names(recipe: Recipe) -> str:
    return ", ".join(phase.name for phase in recipe.phases)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _told(what: str, changes: Sequence[Change], cure: str) -> str:
    return "\n".join([what, *(f"  {name} was {then}, now {now}" for name, then, now in changes), cure])


def _cure(record: CheckpointRecord, run: RunRecord, request: Request, changes: Sequence[Change]) -> str:
    """How a finished run is trained on: by a new one, if that can take its weights; a licence needs no training."""
    if [name for name, _, _ in changes] == [CARD_LICENCE]:
        words = ["python", "pretraining/export.py", str(request.out), "--out", str(request.out / EXPORT)]
        return "to write it into the model card: " + shlex.join([*words, "--licence", changes[0][2]])
    same_vocabulary = run.data.vocabulary == request.manifest.content["vocabulary"]["sha256"]
    if record.shape.differences(request.shape) or not same_vocabulary:
        return "name a new folder"
    new = next(path for path in map("{}-{}".format, [request.out] * 99, count(2)) if not Path(path).exists())
    words = [*without_options(request.command, ("--out", "--run", "--init")), "--init", str(request.out), "--out", new]
    return f"to train more, start a new run with its weights, which does all phases of its recipe:\n{shlex.join(words)}"


def without_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words of a command without some options and their values."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in names:
            next(rest, None)
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def what_has_changed(record: CheckpointRecord, request: Request, context: Context, engine: Engine) -> list[str]:
    """Lists what is otherwise than in the checkpoint, and may be."""
    made_by, run = record.made_by, RunRecord.of(record)
    ranks: list[Change] = [
        ("ranks", made_by.ranks, context.world.size),
        ("parallel.zero", made_by.zero, engine.zero),
        ("precision.dtype", made_by.dtype, name_dtype(engine.dtype)),
    ]
    told = {name for name, _, _ in ranks}
    changes = [change for change in ranks if change[1] != change[2]]
    changes += [change for change in differing(run.recipe, request.recipe.as_dict()) if change[0] not in told]
    done = tuple(f"phases.{number}." for number in range(run.state.phase))
    return [
        f"{name} {then} -> {now}" + (" (that phase is done)" if name.startswith(done) else "")
        for name, then, now in changes
    ]


def differing(then: Any, now: Any) -> list[Change]:
    """The values in which two tables differ, by their dotted names."""
    before, here = dict(flattened(then)), dict(flattened(now))
    pairs = [(name, before.get(name, NOT_SET), here.get(name, NOT_SET)) for name in sorted({*before, *here})]
    return [(name, was, is_now) for name, was, is_now in pairs if was != is_now]


def flattened(table: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables and lists of tables, by their dotted names."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        yield above, table
        return
    for name, value in table.items():
        yield from flattened(value, f"{above}.{name}" if above else str(name))
