"""Reads recipes of pre-training, fills in the sizes of their base model, and checks them against it and the data.

    python pretraining/train.py --recipe bert_mini --phases.0.steps 100 --parallel.zero 2

The settings are in `settings.py`, contradictions between them in `conflicts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, read_settings
from data_prep.common.sections import May, list_settings
from data_prep.common.toml_text import Key, show_value
from pretraining.architectures.declaration import KEY, find_architecture
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Model, Recipe
from pretraining.data.corpora import Corpora
from pretraining.model.shape import Shape
from pretraining.objectives.declaration import Objective, configure_objective

RECIPES = Path(__file__).parent.parent / "recipes"
"""The folder of the recipes that come with the package."""
FindShape = Callable[[str], Shape]
"""Finds the sizes of a model by its folder or name, or raises UserError."""
BASE_MODEL = "base_model"
FORM = Form(Recipe, RECIPES)


def load_recipe_and_data(
    path: Path,
    overrides: Sequence[str] = (),
    data: Sequence[str | Path] = (),
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    find_shape: FindShape | None = None,
    done: int = 0,
) -> tuple[Recipe, Corpora | None]:
    """Reads recipe and data, as `--data` names it, and checks them against each other; reports all faults at once. The
    first phases may be `done` already."""
    corpora, faults = None, []
    if data:
        try:
            corpora = Corpora.read(data)
        except UserError as error:
            faults.append(str(error))
    lengths = corpora.lengths() if corpora else None
    try:
        recipe = load_recipe(path, overrides, ranks=ranks, device=device, lengths=lengths, find_shape=find_shape)
    except UserError as error:
        raise UserError("\n".join([str(error), *faults])) from None
    if corpora:
        manifest = corpora.common
        faults += find_mixture_faults(recipe, corpora, done)
        kinds = [configure_objective(settings) for settings in recipe.list_objectives()]
        if recipe.model.segments < 2 and any(kind.learning(manifest.has_pairs).pairs for kind in kinds):
            cure = "take objective.next_sentences = false, or data of shard.py --pairs none"
            faults.append(f"model.segments = 1: the data has pairs, of two segments; {cure}")
        for kind in kinds:
            faults += kind.data_faults(manifest)
        if manifest.settings.tokenizer is not None:  # WordPiece always has a piece for masks
            faults += find_mask_faults(kinds, corpora.folder)
    if faults:
        raise UserError("\n".join(faults))
    return recipe, corpora


def find_mixture_faults(recipe: Recipe, corpora: Corpora, done: int) -> Iterator[str]:
    """Yields the faults in mixtures of phases: names and lengths that corpora do not have. The first phases, which are
    `done`, need nothing."""
    there = {part.name for part in corpora.parts}
    for number, phase in enumerate(recipe.phases[done:], done):
        faults = False
        for name in ("mix", "last_mix", "mix_temperature"):
            given = getattr(phase, name)
            said = f"phases.{number}.{name} = {show_value(given)}"
            unknown = sorted(given.keys() - there) if isinstance(given, dict) else []
            if given is not None and not corpora.is_named:
                faults = True
                yield f"{said}: the corpora have no names; name them: --data NAME={corpora.folder}"
            elif unknown:
                faults = True
                yield f"{said}: --data names no {', '.join(unknown)}; there is {', '.join(sorted(there))}"
        if not faults and phase.length <= max(corpora.lengths()):
            given = {**(phase.mix or {}), **(phase.last_mix or {})}
            read = {name for name, share in given.items() if share} if phase.mix else there
            fault, mixture = corpora.select(read).find_length_fault(phase.length), phase.mixture(corpora)
            unread = sorted(
                read - {name for name, own in zip(mixture.names, mixture.examples, strict=True) if own < inf}
            )
            if fault is not None:
                yield f"phases.{number}.length = {phase.length}: {fault}; make them alike with shard.py --lengths"
            elif unread and corpora.is_named:
                cure = "give it examples of this length, or a larger share"
                yield f"phases.{number}: would read nothing of {', '.join(unread)}; {cure}, or leave it out of mix"


def find_mask_faults(objectives: Sequence[Objective], data: Path) -> Iterator[str]:
    """Yields the objectives that need a piece for masks, where the vocabulary of the data has none of its own."""
    from data_prep.vocabulary.source import read_vocabulary  # loads numba

    special = read_vocabulary(data).special_pieces
    for name in [each.settings.name for each in objectives if each.needs_masks and special.mask == special.sep]:
        cure = 'take a vocabulary with a mask_token in its tokenizer_config.json, or objective.name = "ltr"'
        yield f'objective.name = "{name}": needs a piece for masks, and {special.mask} stands for separators; {cure}'


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    lengths: Collection[int] | None = None,
    find_shape: FindShape | None = None,
) -> Recipe:
    """Reads a recipe from its file and `--section.key value` flags; reports all faults of both at once.

    Checks it against the number of ranks, the device and the lengths of the data if given. `find_shape` finds the sizes
    of the base model; without it they are not filled in.
    """
    return read_settings(
        FORM,
        path,
        overrides,
        find_faults=lambda recipe: find_faults(recipe, ranks=ranks, device=device, lengths=lengths),
        add=lambda raw: {} if find_shape is None else take_over(raw, find_shape),
    )


def take_over(raw: dict[str, Any], find_shape: FindShape) -> dict[Key, str]:
    """Fills the model of a raw recipe with the sizes of its base model, if it names one.

    Returns faults by key, each as the text that follows the key in a message.
    """
    name, model = raw.get(BASE_MODEL), raw.setdefault("model", {})
    if not isinstance(name, str) or not name or not isinstance(model, dict):
        return {}  # no base model, or a fault that is reported elsewhere
    try:
        sizes = list_sizes(find_shape(name))
    except UserError as error:
        return {(BASE_MODEL,): f" {error}"}
    faults = dict(_find_differences(model, sizes, name))
    raw["model"] = {**sizes, **model}
    return faults


def list_sizes(shape: Shape) -> dict[str, Any]:
    """Lists the model settings of a recipe for this shape."""
    return {name: getattr(shape, name) for name in Model.model_fields if hasattr(shape, name)}


def _find_differences(model: Mapping[str, Any], sizes: Mapping[str, Any], base: str) -> Iterator[tuple[Key, str]]:
    """Finds sizes in a recipe that differ from those of its base model; more positions are allowed."""
    free = list_settings(Model, May.DIFFER_FROM_BASE)
    for setting, theirs in sizes.items():
        given, may_grow = model.get(setting, theirs), setting == "positions"
        if setting in free or given == theirs or not isinstance(given, str if setting == KEY else int | float):
            continue
        if not may_grow or given < theirs:
            cure = "leave it out" + (", or give more, which begin anew" if may_grow else " (see --recipe adapt)")
            yield ("model", setting), f" = {show_value(given)}: {base} has {show_value(theirs)}; {cure}"
    size, published = str(model.get("size")), find_architecture(sizes[KEY]).sizes
    if size in published:
        layers, hidden = published[size]
        if (model.get("layers", layers), model.get("hidden", hidden)) != (sizes["layers"], sizes["hidden"]):
            said = f' = "{size}": {base} has {sizes["layers"]} layers of {sizes["hidden"]}'
            yield ("model", "size"), f"{said}; leave it out (see --recipe adapt)"
