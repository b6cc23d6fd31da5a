"""Reads recipes of pre-training, and checks them against their base model and data.

    python pretraining/train.py --recipe bert_mini --phases.0.steps 100 --parallel.zero 2

The settings are in `settings.py`, contradictions between them in `conflicts.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from data_prep.common.errors import UserError
from data_prep.common.reading import Form, no_additions, read_settings
from data_prep.common.storage import wait_for_storage
from data_prep.settings import SHORTEST
from data_prep.shards import MANIFEST, Manifest
from pretraining.config.base import KEY as BASE_MODEL
from pretraining.config.base import FindShape, take_over
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Recipe
from pretraining.objectives.declaration import configure_objective

RECIPES = Path(__file__).parent.parent / "recipes"
"""The folder of the recipes that come with the package."""
FORM = Form(
    Recipe,
    RECIPES,
    rivals={
        "steps": ("share", "hours"),
        "share": ("steps",),
        "hours": ("steps",),
        "warmup": ("warmup_steps",),
        "warmup_steps": ("warmup",),
    },
    stand_ins={"phases": {"name": "?", "length": SHORTEST, "batch": 1, "micro_batch": 1}},
    flags={BASE_MODEL: "init"},
)


def load_recipe_and_data(
    path: Path,
    overrides: Sequence[str] = (),
    data: Path | None = None,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    find_shape: FindShape | None = None,
) -> tuple[Recipe, Manifest | None]:
    """Reads recipe and data and checks them against each other; reports all faults at once."""
    manifest, faults = None, []
    if data is not None:
        try:
            manifest = wait_for_storage(partial(Manifest.read, data), data / MANIFEST, usual=0)
            manifest.require_examples(data)
        except UserError as error:
            faults.append(f"--data {error}")
    lengths = manifest.lengths() if manifest else None
    try:
        recipe = load_recipe(path, overrides, ranks=ranks, device=device, lengths=lengths, find_shape=find_shape)
    except UserError as error:
        raise UserError("\n".join([str(error), *faults])) from None
    if manifest and recipe.model.segments < 2 and manifest.has_pairs:
        faults.append("model.segments = 1: the data has pairs, of two segments; make it with shard.py --pairs none")
    if manifest:
        faults += configure_objective(recipe.objective).data_faults(manifest)
    if faults:
        raise UserError("\n".join(faults))
    return recipe, manifest


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
        add=no_additions if find_shape is None else lambda raw: take_over(raw, find_shape),
    )
