"""Reads recipes: TOML files whose values can be given anew on the command line, by their dotted names.

    python pretraining/train.py --recipe pretraining/recipes/bert_mini.toml --phases.0.steps 100 --parallel.zero 2

What a recipe may say is in `recipe.py`, what cannot be in `faults.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.settings import SHORTEST
from data_prep.shards import Manifest
from pretraining.config.conflicts import find_faults
from pretraining.config.settings import Phase, Recipe, Section, micro_batches
from pretraining.config.toml_text import Key, dotted, read_toml, shown

__all__ = ["Phase", "Recipe", "find_faults", "load_recipe", "micro_batches"]


@dataclass(frozen=True)
class Override:
    """A value of the command line."""

    key: Key
    value: Any
    bare: bool
    """just its name was given, as one writes a switch"""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    lengths: Collection[int] | None = None,
) -> Recipe:
    """A recipe from its file and `--section.key value` flags; every fault of both is reported at once.

    The number of ranks, the device found and the lengths of the data are checked against it where they are given.
    """
    raw = _read_toml(path)
    given, faults = parse_overrides(overrides)
    for override in given:
        if fault := _apply(raw, override):
            faults.append(fault)
    flags = [override.key for override in given]
    recipe, broken, wording = _validate(raw, [override.key for override in given if override.bare])
    found = [(key, f"{dotted(key)}{text}") for key, text in wording]
    if recipe is not None:
        semantic = find_faults(recipe, ranks=ranks, device=device, lengths=lengths)
        found += [(_key_of(fault), fault) for fault in semantic if not any(_mentions(fault, key) for key in broken)]
    for key, fault in found:
        from_flag = any(key[: len(flag)] == flag or flag[: len(key)] == key for flag in flags if key)
        faults.append(f"--{fault}" if from_flag else f"{path}: {fault}")
    if faults or recipe is None:
        raise UserError("\n".join(faults))
    return recipe


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [each.stem for each in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}.toml?" if near else ""
        raise UserError(f"--recipe {path}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--recipe {path}: cannot be read: {error}") from error


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """`--section.key value`, `--section.key=value`, or `--section.key` alone for true; and what is none of these."""
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
    """`phases.0.micro-batch` as its parts; DeepSpeed's own names stay as they are."""
    parts = name.split(".")
    if parts[0] != "deepspeed":
        parts = [part.replace("-", "_") for part in parts]
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def parse_value(text: str) -> Any:
    """A value as TOML writes it, otherwise the text itself: `1e-4`, `true`, `[0.9, 0.98]`, `bf16`."""
    try:
        content = read_toml(f"value = {text}")
    except ValueError:
        content = {}
    if content.keys() == {"value"}:  # a text with line ends could hold more
        return content["value"]
    return float(text) if re.fullmatch(r"[-+]?(\d+\.|\.\d+)([eE][-+]?\d+)?", text) else text  # .5 is no TOML


RIVALS = {
    "steps": ("share", "hours"),
    "share": ("steps",),
    "hours": ("steps",),
    "warmup": ("warmup_steps",),
    "warmup_steps": ("warmup",),
}
"""what a value of the command line takes the place of"""


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


STAND_IN = {"name": "?", "length": SHORTEST, "batch": 1, "micro_batch": 1}
"""for what a phase lacks, so that the rest of the recipe can be checked all the same"""


def _validate(raw: dict[str, Any], bare: Collection[Key]) -> tuple[Recipe | None, list[Key], list[tuple[Key, str]]]:
    """The recipe as far as it can be read, the keys left out of it, and what is wrong with each."""
    faults: list[tuple[Key, str]] = []
    while True:
        try:
            return Recipe.model_validate(raw), [key for key, _ in faults], faults
        except ValidationError as error:
            errors = error.errors()
        before = len(faults)
        for each in errors:
            key = each["loc"]
            if not any(key == known for known, _ in faults):
                faults.append((key, _wording(each, key in bare)))
                _leave_out(raw, key)
        if len(faults) == before:  # nothing more can be left out
            return None, [], faults


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


NEEDED = {
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "string_type": 'a text is needed, in quotes: "…"',
    "string_too_short": "a text is needed",
    "dict_type": "a table is needed",
    "model_type": "a table is needed",
    "model_attributes_type": "a table is needed",
    "tuple_type": "a list is needed",
    "too_long": "{max_length} values are needed",
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "literal_error": "one of {expected}",
}


def _wording(error: Any, bare: bool) -> str:
    """One of pydantic's errors as what follows the key."""
    kind, key, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f": unknown{_nearest(key)}"
    if kind == "missing":
        return ": is missing" if isinstance(key[-1], int) else f": is missing: {_description(key)}"
    if bare:
        return f": a value is missing: --{dotted(key)} VALUE"
    if kind == "literal_error":
        context = {"expected": context["expected"].replace("'", '"').replace(" or ", ", ")}
    limits = {name: str(value).removesuffix(".0") for name, value in context.items()}
    needed = NEEDED[kind].format(**limits) if kind in NEEDED else error["msg"]
    return f" = {shown(error['input'])}: {needed}"


def _description(key: Key) -> str:
    """The documentation of a field, as part of a sentence."""
    section: Any = Recipe
    for part in key[:-1]:
        if isinstance(part, str):
            section = {**SECTIONS, "phases": Phase}.get(part, section)
    text = section.model_fields[str(key[-1])].description or ""
    return (text[:1].lower() + text[1:]).rstrip(".")


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def known_keys() -> Iterator[Key]:
    """All that a recipe may say; phases with number 0."""
    for name in Recipe.model_fields:
        yield (name,)
        if name in SECTIONS:
            yield from ((name, inner) for inner in SECTIONS[name].model_fields)
        elif name == "phases":
            yield from ((name, 0, inner) for inner in Phase.model_fields)


USUAL_NAMES = {
    usual: ours
    for ours, names in {
        "learning_rate": "rate lr max_lr",
        "length": "max_seq_length seq_length sequence_length max_length",
        "batch": "global_batch batch_size global_batch_size train_batch_size",
        "micro_batch": "micro_batch_size per_device_train_batch_size",
        "steps": "num_train_steps max_steps total_steps",
        "decay": "scheduler schedule lr_schedule lr_scheduler_type",
        "warmup": "warmup_proportion warmup_ratio",
        "warmup_steps": "num_warmup_steps",
        "clip": "max_grad_norm gradient_clipping grad_clip",
        "epsilon": "eps adam_epsilon",
        "zero": "stage zero_stage",
        "dtype": "bf16 fp16",
        "layers": "num_layers num_hidden_layers",
        "heads": "num_heads num_attention_heads",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "every": "save_steps eval_steps logging_steps",
    }.items()
    for usual in names.split()
}
"""what other trainers call it"""


def _nearest(key: Key) -> str:
    """The known name that was probably meant, with its full path; otherwise the names there are."""
    name, above = str(key[-1]), key[:-1]
    plain = tuple(0 if isinstance(part, int) else part for part in above)
    beside = [known for known in known_keys() if known[:-1] == plain]
    elsewhere = [known for known in known_keys() if known[:-1] != plain]
    joined = {"_".join(map(str, known)): known for known in known_keys() if len(known) > 1}
    if not above and (near := difflib.get_close_matches(name, joined, 1, 0.85)):
        return f"; did you mean {dotted(joined[near[0]])}?"  # --model-size
    for wanted, cutoff in ((USUAL_NAMES.get(name, name), 0.7), (name, 0.6)):
        for among in (beside, elsewhere):
            names = [str(known[-1]) for known in among]
            if near := difflib.get_close_matches(wanted, names, 1, cutoff):
                found = among[names.index(near[0])]
                full = (*above, found[-1]) if among is beside else found
                return f"; did you mean {dotted(full)}?"
    return f"; there is {', '.join(str(known[-1]) for known in beside)}"


def load_recipe_and_data(
    path: Path,
    overrides: Sequence[str] = (),
    data: Path | None = None,
    *,
    ranks: int | None = None,
    device: Literal["cpu", "cuda"] | None = None,
) -> tuple[Recipe, Manifest | None]:
    """Both, checked against each other; every fault of them is reported at once."""
    manifest, faults = None, []
    if data is not None:
        try:
            manifest = Manifest.read(data)
        except UserError as error:
            faults.append(f"--data {error}")
    lengths = {shards.length for shards in manifest.sets() if not shards.validation} if manifest else None
    try:
        recipe = load_recipe(path, overrides, ranks=ranks, device=device, lengths=lengths)
    except UserError as error:
        raise UserError("\n".join([str(error), *faults])) from None
    if faults:
        raise UserError("\n".join(faults))
    return recipe, manifest
