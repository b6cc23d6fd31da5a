"""Reads TOML files of settings, whose values can be given anew on the command line by their dotted names.

    --optimizer.clip 0.5 --phases.0.steps=100 --compute.deterministic --objective.last_rate=

An empty value leaves out what the file says, so that the default counts. What is wrong with a file and with the command
line is told at once, each fault with its place and with the name that was probably meant. tyro reads the flags of
commands, but not these: it stops at the first fault, never says that `--optimizer.lr` is called
`phases.0.learning_rate`, and has no place for the names of DeepSpeed's own.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.sections import InsteadOf, Removed, Section, ShortFlag, find_facts, tell_removed
from data_prep.common.toml_text import Key, dotted, read_toml, show_value

Settings = TypeVar("Settings", bound=Section)
FOREIGN = "deepspeed"
"""The table with DeepSpeed's own names, which stay as they are given."""
NEEDED = {
    "missing": "is missing",
    "string_type": 'a text is needed, in quotes: "…"',
    "tuple_type": "a list is needed",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table is needed"),
}
"""Words for pydantic's errors whose own words are about Python."""
USUAL_NAMES = {
    usual: ours
    for ours, names in {
        "learning_rate": "rate lr max_lr",
        "length": "sequence_length",
        "batch": "global_batch batch_size global_batch_size train_batch_size",
        "micro_batch": "per_device_train_batch_size",
        "steps": "num_train_steps",
        "epochs": "num_train_epochs",
        "decay": "scheduler schedule lr_schedule lr_scheduler_type",
        "warmup": "warmup_proportion warmup_ratio",
        "clip": "max_grad_norm gradient_clipping",
        "epsilon": "eps",
        "zero": "stage zero_stage",
        "dtype": "bf16 fp16",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "every": "save_steps eval_steps logging_steps",
    }.items()
    for usual in names.split()
}
"""What other trainers call our settings, where the letters alone do not lead to ours."""


@dataclass(frozen=True)
class Form(Generic[Settings]):
    """A kind of settings file."""

    settings: type[Settings]
    """The settings that the file can have."""
    folder: Path | None = None
    """Where the recipes lie that come with the package, which are known by their bare names."""
    flag: str = "--recipe"
    """What the command line calls the file."""


def read_settings(
    form: Form[Settings],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    find_faults: Callable[[Settings], list[str]],
    add: Callable[[dict[str, Any]], dict[Key, str]] = lambda _: {},
) -> Settings:
    """Reads a recipe from its file and `--section.key value` flags; every fault of both is reported at once.

    `find_faults` lists what does not go together in values that are right by themselves; `add` puts what the recipe
    leaves to others into what was read, and returns what is wrong with it.
    """
    raw = read_file(form, path)
    given, faults = parse_overrides(overrides)
    faults += put_overrides(form, raw, given)
    for key, value, gone in list_removed(form.settings, raw):
        if gone.allows(value):
            tell_removed(f"{dotted(key)} = {show_value(value)}")
    wrong, settings = add(raw), None
    try:
        settings = form.settings.model_validate(raw)
    except ValidationError as invalid:
        for error in invalid.errors():
            wrong.setdefault(error["loc"], explain(error, form.settings))  # the first fault of a value is told
    found = [(key, f"{dotted(key)}{fault}") for key, fault in wrong.items()]
    if settings is not None and not wrong:
        found = [(parse_key(re.split(r"[:\s]", fault, maxsplit=1)[0]), fault) for fault in find_faults(settings)]
    short = find_facts(form.settings, ShortFlag)
    for key, fault in found:
        from_flag = any(key[: len(flag)] == flag or flag[: len(key)] == key for flag in given if key)
        if from_flag and (fact := short.get(dotted(key))):
            fault = fact.flag + fault.removeprefix(dotted(key))
        faults.append(f"--{fault}" if from_flag else f"{path}: {fault}")
    if faults or settings is None:
        raise UserError("\n".join(faults))
    return settings


def find_recipe(path: Path, folder: Path | None) -> Path:
    """The file of a recipe: one of this path, or one of the folder that is given by its bare name, such as `demo`."""
    if folder is None or path.is_file() or len(path.parts) != 1 or path.suffix not in ("", ".toml"):
        return path
    ours = {own.stem: own for own in sorted(folder.glob("*.toml"))}
    if path.stem in ours:
        return ours[path.stem]
    raise UserError(f"--recipe {path}: no such file, and no recipe of this name\nthere is {', '.join(ours)}")


def read_file(form: Form[Any], path: Path) -> dict[str, Any]:
    """Reads what a file says, without checking it."""
    path = find_recipe(path, form.folder)
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{form.flag} {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{form.flag} {path}: cannot be read: {error}") from error


def peek(form: Form[Any], path: Path | None, overrides: Sequence[str], *key: str) -> str | None:
    """A text of a recipe, or of the flags alone where no recipe is named, that is needed before it can be read as a
    whole; None where there is none.

    Whatever is wrong with the recipe `read_settings` tells.
    """
    with suppress(UserError, KeyError, TypeError):
        raw: Any = {} if path is None else read_file(form, path)
        put_overrides(form, raw, parse_overrides(overrides)[0])
        value = reduce(operator.getitem, key, raw)
        return value if isinstance(value, str) else None
    return None


def peek_device(form: Form[Any], path: Path | None, overrides: Sequence[str]) -> Literal["auto", "cpu", "cuda"]:
    """Where to compute, which ranks must know before they meet, and so before they read the recipe as a whole."""
    device = peek(form, path, overrides, "parallel", "device")
    return "cpu" if device == "cpu" else "cuda" if device == "cuda" else "auto"


def parse_overrides(arguments: Sequence[str]) -> tuple[dict[Key, Any], list[str]]:
    """Reads `--section.key value`, `--section.key=value`, or `--section.key` alone for true.

    Returns the values by their keys, and a fault for everything else.
    """
    overrides: dict[Key, Any] = {}
    faults, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not re.fullmatch(r"--[A-Za-z_][^=\s]*(=.*)?", argument, re.DOTALL):
            faults.append(f"{argument}: not understood; a value of the recipe is given as --section.key value")
            continue
        name, equals, text = argument[2:].partition("=")
        bare = not equals and (not rest or rest[0].startswith("--"))
        overrides[parse_key(name)] = True if bare else parse_value(text if equals else rest.pop(0))
    return overrides, faults


def parse_key(name: str) -> Key:
    """Takes `phases.0.micro-batch` apart; DeepSpeed's own names stay as they are."""
    parts = name.split(".")
    if parts[0] != FOREIGN:
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


def put_overrides(form: Form[Any], raw: dict[str, Any], given: Mapping[Key, Any]) -> list[str]:
    """Puts values of the command line in their places, and removes what they are instead of.

    Returns faults of values that have no place.
    """
    inner = tables(form.settings)
    for key in given:
        table = form.settings if len(key) == 1 else inner.get(str(key[0]))
        fact = find_facts(table, InsteadOf).get(str(key[-1])) if table else None
        for other in ((*key[:-1], *name.split(".")) for name in (fact.names if fact else ())):
            if other not in given:
                with suppress(KeyError, IndexError, TypeError):
                    del reduce(operator.getitem, other[:-1], raw)[other[-1]]  # type: ignore[arg-type]
    return [fault for key, value in given.items() if (fault := _put(raw, key, value))]


def _put(raw: dict[str, Any], key: Key, value: Any) -> str | None:
    """Puts a value in its place; returns what is wrong with the place."""
    place: Any = raw
    for depth, part in enumerate(key):
        is_last, above = depth == len(key) - 1, dotted(key[:depth])
        if not isinstance(place, dict | list):
            return f"--{dotted(key)}: {above} is {show_value(place)}, not a table"
        if isinstance(place, list) and not (isinstance(part, int) and part < len(place)):
            there = f"0 to {len(place) - 1}" if place else "none"
            example = f", as in --{above}.0.{key[-1]}" if isinstance(part, str) and place else ""
            return f"--{dotted(key)}: no number {part} in {above}; there is {there}{example}"
        name: Any = part if isinstance(place, list) else str(part)
        if is_last and value == "" and name in place:
            del place[name]
        elif is_last:
            place[name] = value
        else:
            place = place[name] if isinstance(place, list) else place.setdefault(name, {})
    return None


def explain(error: Mapping[str, Any], settings: type[Section]) -> str:
    """Words an error of pydantic as the text that follows the key in a message."""
    kind, key = error["type"], error["loc"]
    table = tables(settings).get(str(next((part for part in key[-2::-1] if isinstance(part, str)), "")), settings)
    if kind == "extra_forbidden" and (gone := table.list_removed().get(str(key[-1]))):
        return f" = {show_value(error['input'])}: {gone.explain()}"
    if kind == "extra_forbidden":
        return f": unknown{_suggest(key, settings)}"
    needed = NEEDED.get(kind, re.sub(r"^(Input|Tuple) ", "", error["msg"]))
    if kind == "missing":
        return f": {needed}"
    inner = tables(settings).get(str(key[-1]))  # None for one in a list of tables, which has a number
    if kind == "model_type" and inner is not None and "name" in inner.model_fields:
        needed += f"; did you mean {dotted((*key, 'name'))}?"
    return f" = {show_value(error['input'])}: {needed}"


def list_removed(
    settings: type[Section], raw: Mapping[str, Any], above: Key = ()
) -> Iterator[tuple[Key, Any, Removed]]:
    """Lists the keys of a file that are no settings any more, with what it says of them."""
    inner, removed = tables(settings), settings.list_removed()
    for name, value in raw.items():
        if name in removed:
            yield (*above, name), value, removed[name]
        elif name in inner:
            for number, each in enumerate(value if isinstance(value, list) else [value]):
                place: Key = (*above, name, number) if isinstance(value, list) else (*above, name)
                yield from list_removed(inner[name], each, place) if isinstance(each, dict) else ()


def leave_out_removed(settings: type[Section], raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Leaves out of a recorded recipe what is no longer a setting, so that it can be read; returns it, and a fault for
    each value that is not the one that counts now."""
    kept, faults = deepcopy(raw), []
    for key, value, gone in list_removed(settings, raw):
        del reduce(operator.getitem, key[:-1], kept)[key[-1]]  # type: ignore[arg-type]
        if not gone.allows(value):
            faults.append(f"{dotted(key)} = {show_value(value)}: {gone.explain()}")
    return kept, faults


def tables(settings: type[Section]) -> dict[str, type[Section]]:
    """The tables of settings, and what the lists of tables in them have, by their names."""
    found = {}
    for name, field in settings.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)[:1]):
            if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
                found[name] = kind
    return found


def is_list(settings: type[Section], name: str) -> bool:
    """Whether a table stands in settings as often as one likes: [[phases]]."""
    return get_origin(settings.model_fields[name].annotation) is tuple


def known_keys(settings: type[Section]) -> Iterator[Key]:
    """All keys of the settings; in a list of tables those of number 0."""
    inner = tables(settings)
    for name in settings.model_fields:
        yield (name,)
        if name in inner:
            above: Key = (name, 0) if is_list(settings, name) else (name,)
            yield from ((*above, key) for key in inner[name].model_fields)


def _suggest(key: Key, settings: type[Section]) -> str:
    """The known name that was probably meant, with its full path; otherwise the names there are."""
    name, above, every = str(key[-1]), key[:-1], list(known_keys(settings))
    plain = tuple(0 if isinstance(part, int) else part for part in above)
    beside = [known for known in every if known[:-1] == plain]
    elsewhere = [known for known in every if known[:-1] != plain]
    joined = {"_".join(map(str, known)): known for known in every if len(known) > 1}
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
