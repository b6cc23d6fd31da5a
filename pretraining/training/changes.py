"""Compares two starts of a run: refuses a recipe that the run cannot continue with, and lists other changes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from data_prep.common.errors import UserError, quote
from data_prep.common.sections import May, list_settings
from data_prep.common.toml_text import show_value
from pretraining.checkpoint.record import EXPORT
from pretraining.checkpoint.state import RunRecord, Saved
from pretraining.checkpoint.writing import describe_making
from pretraining.config.schedule import build_schedules
from pretraining.config.settings import Phase, Recipe
from pretraining.config.shortening import suggest_share
from pretraining.data.mixing import WHOLE
from pretraining.engine.engine import Engine
from pretraining.model.shape import OF_OBJECTIVE
from pretraining.objectives.declaration import find_objective
from pretraining.processes.context import Context
from pretraining.training.request import Branch, Request

Change = tuple[str, Any, Any]
"""A setting, what it was, and what it is now."""
NOT_SET = "not set"
BASE_MODEL, LICENCE = "base_model", "card.licence"


def continue_run(request: Request, latest: Saved, branch: Branch | None = None) -> Request:
    """Returns the request with the run's base model and licence where the command names none. `branch` names the
    checkpoint if it is another run's.

    Raises UserError if the run cannot continue with it, or is finished and would have to train more.
    """
    recipe, before = request.recipe, latest.run.recipe
    base = before.base_model
    same_base = base and Path(recipe.base_model or base).resolve() == Path(base).resolve()
    card = recipe.card.model_copy(update={"licence": recipe.card.licence or before.card.licence})
    kept = {BASE_MODEL: base if same_base else recipe.base_model, "card": card}
    request = replace(request, recipe=recipe.model_copy(update=kept))
    require_continuation(latest, request, branch)
    return request


def require_continuation(latest: Saved, request: Request, branch: Branch | None = None) -> None:
    """Raises UserError if the run cannot continue with the request, or is finished and would have to train more. In a
    branch, phases that are not begun may be others."""
    run, shape = latest.run, latest.record.shape
    recipe, before = request.recipe, run.recipe
    place, source = (f"--out {request.out}", request.out) if branch is None else (f"--branch {branch}", branch.place)
    begun = None if branch is None else run.state.phase + (run.state.phase_step > 0)
    if run.is_trained and branch is None:
        changes = _compare_data(run, request)
        if changes := [*changes, *list_training_changes(before, recipe)]:
            cure = suggest_share(recipe, before) + _find_cure(latest, request, changes)
            raise UserError(_write_message(f"--out {request.out}: is trained to its end", changes, cure))
        return
    if run.lost:
        raise UserError("\n  ".join([f"{place}: cannot go on, but can be read:", *run.lost]))
    require_data(run, request, source, branch)
    wanted = request.shape_in(run.state.phase - (run.state.phase_step == 0))
    settings: list[Change] = [
        *_name_changes(shape.differences(wanted), request),
        (BASE_MODEL, before.base_model or NOT_SET, recipe.base_model or NOT_SET),
        ("optimizer.name", before.optimizer.name, recipe.optimizer.name),
        ("the phases", _name_phases(before.phases[:begun]), _name_phases(recipe.phases[:begun])),
        *compare_done_phases(run.state.phase, before, recipe),
        *compare_mixtures(run, request),
    ]
    if run.state.phase_step and run.state.phase < len(recipe.phases):  # in a phase, the order of data stays
        settings.append(("seed", before.seed, recipe.seed))
        for name in ("length", "batch"):
            then, now = (getattr(either.phases[run.state.phase], name) for either in (before, recipe))
            settings.append((f"phases.{run.state.phase}.{name}", then, now))
    if changes := select_different(settings):
        is_same = before.objective == recipe.objective
        by_data = shape.learns.pairs != wanted.learns.pairs and is_same  # a fact of the data
        cure = _suggest_new_run(latest, request) if by_data and branch is None else "undo these, or name a new folder"
        cure = suggest_share(recipe, before) + cure
        raise UserError(_write_message(f"{place}: cannot go on with this recipe", changes, cure))
    counts, (phase, done) = recipe.phase_steps(), (run.state.phase, run.state.phase_step)
    if counts is not None and phase < len(counts) and counts[phase] < done:
        fault = f"phases.{phase} has {counts[phase]} steps in this recipe, of which {done} are done"
        cure = "name a new folder" if branch is None else "an earlier @STEP"
        raise UserError(f"{place}: {fault}; give as many, or {cure}")
    if moved := find_moved_end(run, recipe):
        raise UserError(f"{place}: {moved}")
    if branch is not None and run.state.phase >= len(recipe.phases):
        raise UserError(f"{place}: has done all phases of this recipe; give it more phases, or the last one more steps")


def _name_changes(changes: Iterable[Change], request: Request) -> Iterator[Change]:
    """Names the differences of shapes as users know them: by the keys of a recipe, if any."""
    names = {
        "vocabulary": "pieces of the vocabulary",
        "pairs": find_objective(request.shape).pairs_head,
        "objective": "the objective" if any(each.objective for each in request.recipe.phases) else "objective.name",
        "sees": "which pieces one sees",
    }
    for name, then, now in changes:
        yield names.get(name, name if name.startswith(OF_OBJECTIVE) else f"model.{name}"), then, now


def require_data(run: RunRecord, request: Request, source: Path, branch: Branch | None) -> None:
    """Raises UserError for another vocabulary than that of the run in the folder `source`, and for other text unless
    this is a branch of it."""
    if not has_vocabulary(run, request):
        raise UserError(
            f"--data {request.corpora}: has another vocabulary than {source} was trained with; make it with "
            f"shard.py --vocab {quote(source)}, or name a new folder"
        )
    changes = _compare_data(run, request)
    if changes and branch is None:
        others = [f"{name.removeprefix('the ')} {before}, here {here}" for name, before, here in changes]
        raise UserError(
            f"--data {request.corpora}: {source} was trained on other data ({'; '.join(others)}); give "
            f"that folder, or go on with these in a branch: --branch {quote(source)} --out NEW"
        )


def _compare_data(run: RunRecord, request: Request) -> list[Change]:
    """Lists the fingerprints that changed, by corpus where corpora have names."""
    before = {name: each["fingerprint"][:12] for name, each in run.data.corpora.items()}
    before = before or {"": run.data.fingerprint[:12]}
    here = {part.name: part.manifest.fingerprint[:12] for part in request.corpora.parts}
    names = {name: f"the fingerprint of {name or 'the data'}" for name in {**before, **here}}
    return select_different((said, before.get(name, NOT_SET), here.get(name, NOT_SET)) for name, said in names.items())


def compare_mixtures(run: RunRecord, request: Request) -> list[Change]:
    """Compares the mixtures of begun phases as recipes give them and, where these agree, the shares of the phase that
    goes on, which may follow from sizes."""
    state, phases = run.state, request.recipe.phases
    begun = zip(run.recipe.phases, phases[: state.phase + (state.phase_step > 0)], strict=False)
    changes: list[Change] = []
    for number, pair in enumerate(begun):
        for name in ("mix", "last_mix", "mix_temperature"):
            then, now = (_describe_mix(getattr(each, name)) for each in pair)
            changes += select_different([(f"phases.{number}.{name} (which is begun)", then, now)])
    if changes or not state.phase_step or state.phase >= len(phases):
        return changes
    read = state.corpora[state.phase] if state.phase < len(state.corpora) else {}
    mixture, named = phases[state.phase].mixture(request.corpora), request.corpora.is_named
    shares = [
        {name: each["first"] / WHOLE for name, each in read.items()},
        {name: share / WHOLE for name, share in zip(mixture.names, mixture.first, strict=True) if named},
    ]
    then, now = (_describe_mix(each) if each else "one folder without a name" for each in shares)
    return select_different([(f"the shares of phases.{state.phase} (which is begun)", then, now)])


def _describe_mix(value: Any) -> str:
    return NOT_SET if value is None else show_value(dict(sorted(value.items())) if isinstance(value, dict) else value)


def find_moved_end(run: RunRecord, recipe: Recipe) -> str | None:
    """Describes why a phase that is begun, whose shares move over its steps, cannot have other steps; None if it has
    the same."""
    number, steps = run.state.phase, (run.recipe.phase_steps(), recipe.phase_steps())
    if not run.state.phase_step or number >= len(recipe.phases) or run.recipe.phases[number].last_mix is None:
        return None
    then, now = (each and each[number] for each in steps)
    said = f"phases.{number}.last_mix: the shares move over its {then} steps, of which {run.state.phase_step} are done"
    return None if then == now else f"{said}; with {now} steps, what was read would have had other shares"


def has_vocabulary(run: RunRecord, request: Request) -> bool:
    """Whether the data has the vocabulary that the run was trained with."""
    return run.data.vocabulary == request.corpora.common.vocabulary.sha256


def list_training_changes(before: Recipe, recipe: Recipe) -> list[Change]:
    """Lists the changes that make a recipe another training, rather than the same one done in another way."""
    changes = compare_recipes(before, recipe)
    free = list_settings(Recipe, May.CHANGE_BETWEEN_STARTS)
    return [each for each in changes if each[0].partition(".")[0] not in free and not each[0].endswith(".micro_batch")]


def compare_done_phases(done: int, before: Recipe, recipe: Recipe) -> Iterator[Change]:
    """Compares the lengths of the phases that are done: they are not trained again."""
    for number in range(min(done, len(recipe.phases))):
        given = before.phases[number].steps is not None and recipe.phases[number].steps is not None
        name = f"phases.{number}.steps" if given else f"the length of phases.{number}"
        yield f"{name} (which is done)", _describe_length(before, number), _describe_length(recipe, number)


def _describe_length(recipe: Recipe, number: int) -> str:
    steps, seconds = recipe.phase_steps(), recipe.phase_seconds()
    if steps is not None:
        return f"{steps[number]}"
    return f"{seconds[number] / 3600:g} hours" if seconds is not None else "not known"


def _name_phases(phases: Iterable[Phase]) -> str:
    return ", ".join(phase.name for phase in phases)


def _write_message(what: str, changes: Sequence[Change], cure: str) -> str:
    return "\n".join([what, *(f"  {name} was {then}, now {now}" for name, then, now in changes), cure])


def _find_cure(latest: Saved, request: Request, changes: Sequence[Change]) -> str:
    """Says how to train a finished run further. A licence needs no training."""
    names = [name for name, _, _ in changes]
    if names == [LICENCE]:
        words = ["python", "pretraining/export.py", str(request.out), "--out", str(request.out / EXPORT)]
        return "to write it into the model card: " + shlex.join([*words, "--licence", changes[0][2]])
    return "name a new folder" if BASE_MODEL in names else _suggest_new_run(latest, request)


def _suggest_new_run(latest: Saved, request: Request) -> str:
    """Says which options start a new run with the weights of this one or, if it is finished, with its whole state."""
    sizes = [name for name, _, _ in latest.record.shape.differences(request.shape) if name != "pairs"]
    if sizes or not has_vocabulary(latest.run, request):
        return "name a new folder"
    words = f"{quote(request.out)} --out NEW"
    state = f"to go on with its state, in more steps or phases: --branch {words}\n" * latest.run.is_trained
    return f"{state}to start a new run with its weights, which does all phases of its recipe: --init {words}"


def list_changes(latest: Saved, request: Request, context: Context, engine: Engine) -> list[str]:
    """Lists the settings that differ from those of the checkpoint, and may."""
    run, then, now = latest.run, latest.record.made_by, describe_making(engine, context.world.size)
    listed = {"ranks": "ranks", "parallel.zero": "zero", "precision.dtype": "dtype"}
    if then.ranks == now.ranks and then.threads and now.threads:  # both on CPUs
        listed |= {"threads of a rank": "threads", "kernels": "kernels"}
    ranks: list[Change] = [(name, getattr(then, field), getattr(now, field)) for name, field in listed.items()]
    changes = [*select_different(ranks), *_compare_data(run, request)]
    others = find_other_phases(run.recipe, request.recipe)
    inside = tuple(f"{phase}." for phase, *_ in others)
    recipes = compare_recipes(run.recipe, request.recipe)
    changes += [each for each in recipes if each[0] not in listed and not each[0].startswith(inside)] + others
    done = tuple(f"phases.{number}." for number in range(run.state.phase))
    return [
        f"{name} {before} -> {here}" + (" (that phase is done)" if name.startswith(done) else "")
        for name, before, here in changes
    ]


def describe_jump(latest: Saved, recipe: Recipe) -> str | None:
    """Describes how the learning rate jumps at a checkpoint, inside a schedule that the recipe changes; None if it
    goes on smoothly."""
    state, before = latest.run.state, latest.run.recipe
    at, done, seconds = state.phase, state.phase_step, state.phase_seconds
    if at >= min(len(before.phases), len(recipe.phases)) or (not done and recipe.schedule_owners()[at] == at):
        return None
    then, now = (f"{build_schedules(each)[at].learning_rate(done, seconds):.1e}" for each in (before, recipe))
    return None if then == now else f"the learning rate jumps at step {state.step:,}: {then} -> {now}"


def find_other_phases(then: Recipe, now: Recipe) -> list[Change]:
    """Lists the phases that another one takes the place of, or that only one of two recipes has, by their names."""
    names = ((phase.name for phase in recipe.phases) for recipe in (then, now))
    pairs = enumerate(zip_longest(*names, fillvalue=NOT_SET))
    return select_different((f"phases.{number}", before, here) for number, (before, here) in pairs)


def compare_recipes(then: Recipe, now: Recipe) -> list[Change]:
    """Lists the values that differ between two recipes, by their dotted names."""
    before, here = dict(_flatten(then.as_dict())), dict(_flatten(now.as_dict()))
    names = sorted({*before, *here})
    return select_different((name, before.get(name, NOT_SET), here.get(name, NOT_SET)) for name in names)


def select_different(values: Iterable[Change]) -> list[Change]:
    """Selects the values that changed."""
    return [(name, then, now) for name, then, now in values if then != now]


def _flatten(table: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Lists the values of nested tables and lists of tables, by their dotted names."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        table = dict(enumerate(table))
    if not isinstance(table, dict):
        yield above, table
        return
    for name, value in table.items():
        yield from _flatten(value, f"{above}.{name}" if above else str(name))
