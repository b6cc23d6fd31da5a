"""Reads recipes: TOML files whose values can be given anew on the command line, by their dotted names.

    python pretraining/train.py --recipe bert_mini --phases.0.steps 100 --parallel.zero 2

What a recipe may say is in `settings.py`, and what cannot be together in `conflicts.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.settings import SHORTEST
from data_prep.shards import Manifest
from pretraining.config.base import KEY as BASE_MODEL
from pretraining.config.base import FindShape, take_over
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Recipe
from pretraining.config.toml_text import Key, dotted, read_toml, shown
from pretraining.config.wording import explain

RECIPES = Path(__file__).parent.parent / "recipes"
"""The folder of the recipes that come with the package."""
RIVALS = {
    "steps": ("share", "hours"),
    "share": ("steps",),
    "hours": ("steps",),
    "warmup": ("warmup_steps",),
    "warmup_steps": ("warmup",),
}
"""Settings that a value of the command line takes the place of."""
STAND_IN = {"name": "?", "length": SHORTEST, "batch": 1, "micro_batch": 1}
"""Values for what a phase lacks, so that the rest of the recipe can be checked all the same."""


@dataclass(frozen=True)
class Override:
    """A value of the command line."""

    key: Key
    value: Any
    bare: bool
    """Whether just the name was given, as one writes a switch."""


def load_recipe_and_data(
    path: Path,
    overrides: Sequence[str] = (),
    data: Path | None = None,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    find_shape: FindShape | None = None,
) -> tuple[Recipe, Manifest | None]:
    """Reads both and checks them against each other; every fault of them is reported at once."""
    manifest, faults = None, []
    if data is not None:
        try:
            manifest = Manifest.read(data)
        except UserError as error:
            faults.append(f"--data {error}")
    lengths = manifest.lengths() if manifest else None
    try:
        recipe = load_recipe(path, overrides, ranks=ranks, device=device, lengths=lengths, find_shape=find_shape)
    except UserError as error:
        raise UserError("\n".join([str(error), *faults])) from None
    if manifest and recipe.model.segments < 2 and manifest.has_pairs:
        faults.append("model.segments = 1: the data has pairs, of two segments; make it with shard.py --pairs none")
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
    """Reads a recipe from its file and `--section.key value` flags; every fault of both is reported at once.

    The number of ranks, the device found and the lengths of the data are checked against it where they are given.
    `find_shape` finds the sizes of the base model, where the recipe names one; without it they are not looked for.
    """
    raw = _read_file(find_recipe(path))
    given, faults = parse_overrides(overrides)
    for override in given:
        if fault := _apply(raw, override):
            faults.append(fault)
    differing = take_over(raw, find_shape) if find_shape is not None else {}
    recipe, unreadable = _validate(raw, [override.key for override in given if override.bare])
    found = [(key, f"{dotted(key)}{fault}") for key, fault in (unreadable | differing).items()]
    if recipe is not None:
        conflicts = find_faults(recipe, ranks=ranks, device=device, lengths=lengths)
        found += [
            (_key_of(fault), fault) for fault in conflicts if not any(_mentions(fault, key) for key in unreadable)
        ]
    flags = [override.key for override in given]
    for key, fault in found:
        from_flag = any(key[: len(flag)] == flag or flag[: len(key)] == key for flag in flags if key)
        faults.append(f"--{_with_short_flag(fault)}" if from_flag else f"{path}: {fault}")
    if faults or recipe is None:
        raise UserError("\n".join(faults))
    return recipe


def peek(path: Path, overrides: Sequence[str], *key: str) -> str | None:
    """A text of a recipe that is needed before the recipe can be read as a whole; None where there is none.

    Whatever is wrong with the recipe `load_recipe` tells.
    """
    with suppress(UserError, KeyError, TypeError):
        raw: Any = _read_file(find_recipe(path))
        for override in parse_overrides(overrides)[0]:
            _apply(raw, override)
        for part in key:
            raw = raw[part]
        return raw if isinstance(raw, str) else None
    return None


def _with_short_flag(fault: str) -> str:
    """A fault of the base model begins with the flag that one names it by."""
    return f"init{fault.removeprefix(BASE_MODEL)}" if fault.startswith(BASE_MODEL) else fault


def find_recipe(path: Path) -> Path:
    """The file of a recipe: one of this path, or one of ours that is given by its bare name, such as `demo`."""
    ours = {own.stem: own for own in sorted(RECIPES.glob("*.toml"))}
    if path.is_file() or len(path.parts) != 1 or path.suffix not in ("", ".toml"):
        return path
    if path.stem in ours:
        return ours[path.stem]
    near = difflib.get_close_matches(path.stem, ours, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"--recipe {path}: no such file, and no recipe of this name{hint}\nthere is {', '.join(ours)}")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [other.stem for other in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}.toml?" if near else ""
        raise UserError(f"--recipe {path}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--recipe {path}: cannot be read: {error}") from error


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Reads `--section.key value`, `--section.key=value`, or `--section.key` alone for true.

    Returns the values, and a fault for everything else.
    """
    overrides, faults = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not re.fullmatch(r"--[A-Za-z_][^=\s]*(=.*)?", argument, re.DOTALL):
            faults.append(f"{argument}: not understood; a value of the recipe is given as --section.key value")
            continue
        name, equals, text = argument[2:].partition("=")
        bare = not equals and (not rest or rest[0].startswith("--"))
        value = True if bare else parse_value(text if equals else rest.pop(0))
        overrides.append(Override(parse_key(name), value, bare))
    return overrides, faults


def parse_key(name: str) -> Key:
    """Takes `phases.0.micro-batch` apart; DeepSpeed's own names stay as they are."""
    parts = name.split(".")
    if parts[0] != "deepspeed":
        parts = [part.replace("-", "_") for part in parts]
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def parse_value(text: str) -> Any:
    """Reads a value as TOML writes it, otherwise as the text itself: `1e-4`, `true`, `[0.9, 0.98]`, `bf16`."""
    try:
        content = read_toml(f"value = {text}")
    except ValueError:
        content = {}
    if content.keys() == {"value"}:  # a text with line ends could hold more
        return content["value"]
    return float(text) if re.fullmatch(r"[-+]?(\d+\.|\.\d+)([eE][-+]?\d+)?", text) else text  # .5 is no TOML


def _apply(raw: dict[str, Any], override: Override) -> str | None:
    """Puts a value of the command line in its place; returns what is wrong with the place."""
    table: Any = raw
    for depth, part in enumerate(override.key[:-1]):
        if isinstance(table, dict):
            table = table.setdefault(str(part), {})
        elif isinstance(table, list) and isinstance(part, int) and part < len(table):
            table = table[part]
        else:
            return _no_place(table, override.key, depth)
    last = override.key[-1]
    if isinstance(table, dict):
        for rival in RIVALS.get(str(last), ()) if override.key[0] != "deepspeed" else ():
            table.pop(rival, None)
        table[str(last)] = override.value
    elif isinstance(table, list) and isinstance(last, int) and last < len(table):
        table[last] = override.value
    else:
        return _no_place(table, override.key, len(override.key) - 1)
    return None


def _no_place(table: Any, key: Key, depth: int) -> str:
    above = dotted(key[:depth])
    if isinstance(table, list):
        there = f"0 to {len(table) - 1}" if table else "none"
        return f"--{dotted(key)}: no number {key[depth]} in {above}; there is {there}"
    return f"--{dotted(key)}: {above} is {shown(table)}, not a table"


def _key_of(fault: str) -> Key:
    """The key that a fault begins with."""
    return parse_key(re.split(r"[:\s]", fault, maxsplit=1)[0])


def _mentions(fault: str, key: Key) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(dotted(key))}(?![\w])", fault) is not None


def _validate(raw: dict[str, Any], bare: Collection[Key]) -> tuple[Recipe | None, dict[Key, str]]:
    """Reads the recipe as far as it can be read, and says what is wrong with the keys that were left out for it."""
    faults: dict[Key, str] = {}
    while True:
        try:
            return Recipe.model_validate(raw), faults
        except ValidationError as invalid:
            new = [error for error in invalid.errors() if error["loc"] not in faults]
        if not new:  # nothing more can be left out
            return None, faults
        for error in new:
            key = error["loc"]
            if key not in faults:  # the first fault of a value is told
                faults[key] = explain(error, key in bare)
                _leave_out(raw, key)


def _leave_out(raw: Any, key: tuple[Any, ...]) -> None:
    """Removes a value, or puts a stand-in where one must be; a list goes as a whole, except for that of phases."""
    for depth, part in enumerate(key[:-1]):
        if isinstance(raw, dict) and part not in raw:
            return  # it has gone with another fault of its list
        if isinstance(raw[part], list) and key[: depth + 1] != ("phases",):
            del raw[part]
            return
        raw = raw[part]
    last = key[-1]
    if isinstance(raw, list):
        raw[last] = dict(STAND_IN)
    elif key[0] == "phases" and last in STAND_IN:
        raw[last] = STAND_IN[str(last)]
    else:
        raw.pop(last, None)
