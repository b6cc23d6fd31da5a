"""Reads TOML files of settings, whose values can be given anew on the command line by their dotted names.

    --optimizer.clip 0.5 --phases.0.steps=100 --compute.compile --objective.last_rate=

An empty value leaves out what the file says, so that the default counts.
A `Form` says which settings a file has and where those of the house lie. What is wrong with a file and with the command
line is told at once, each fault with its place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import ValidationError

from data_prep.common.errors import UserError
from data_prep.common.sections import Section
from data_prep.common.toml_text import Key, dotted, read_toml, show_value
from data_prep.common.wording import explain

Settings = TypeVar("Settings", bound=Section)
FOREIGN = "deepspeed"
"""The table with DeepSpeed's own names, which stay as they are given."""


@dataclass(frozen=True)
class Form(Generic[Settings]):
    """A kind of settings file."""

    settings: type[Settings]
    """The settings that the file can have."""
    folder: Path | None = None
    """Where the recipes lie that come with the package, which are known by their bare names."""
    flag: str = "--recipe"
    """What the command line calls the file."""
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings that a value of the command line takes the place of, by the name of the value."""
    stand_ins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each list of tables, values for what one of them lacks, so that the rest can be checked all the same."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """What the command line calls a setting that has a short flag: messages name that one."""


class Override(NamedTuple):
    """A value of the command line."""

    key: Key
    value: Any
    bare: bool
    """Whether just the name was given, as one writes a switch."""


def read_settings(
    form: Form[Settings],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    find_faults: Callable[[Settings], list[str]],
    add: Callable[[dict[str, Any]], dict[Key, str]] = lambda _: {},
) -> Settings:
    """Reads a recipe from its file and `--section.key value` flags; every fault of both is reported at once.

    `find_faults` lists what does not go together; `add` puts what the recipe leaves to others into what was read, and
    returns what is wrong with it.
    """
    raw = read_file(form, path)
    given, faults = parse_overrides(overrides)
    for override in given:
        if fault := put(raw, override, form.rivals):
            faults.append(fault)
    faults += find_rivals(given, form.rivals)
    differing = add(raw)
    settings, unreadable = _validate(form, raw, [override.key for override in given if override.bare])
    found = [(key, f"{dotted(key)}{fault}") for key, fault in (unreadable | differing).items()]
    if settings is not None:
        conflicts = (fault for fault in find_faults(settings) if not any(_mentions(fault, key) for key in unreadable))
        found += [(parse_key(re.split(r"[:\s]", fault, maxsplit=1)[0]), fault) for fault in conflicts]
    flags = [override.key for override in given]
    for key, fault in found:
        from_flag = any(key[: len(flag)] == flag or flag[: len(key)] == key for flag in flags if key)
        name = dotted(key)
        short = form.flags.get(name, name) + fault.removeprefix(name)
        faults.append(f"--{short}" if from_flag else f"{path}: {fault}")
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
    near = difflib.get_close_matches(path.stem, ours, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"--recipe {path}: no such file, and no recipe of this name{hint}\nthere is {', '.join(ours)}")


def read_file(form: Form[Any], path: Path) -> dict[str, Any]:
    """Reads what a file says, without checking it."""
    path = find_recipe(path, form.folder)
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [other.stem for other in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}.toml?" if near else ""
        raise UserError(f"{form.flag} {path}: no such file{hint}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{form.flag} {path}: cannot be read: {error}") from error


def peek(form: Form[Any], path: Path | None, overrides: Sequence[str], *key: str) -> str | None:
    """A text of a recipe, or of the flags alone where no recipe is named, that is needed before it can be read as a
    whole; None where there is none.

    Whatever is wrong with the recipe `read_settings` tells.
    """
    with suppress(UserError, KeyError, TypeError):
        raw: Any = {} if path is None else read_file(form, path)
        for override in parse_overrides(overrides)[0]:
            put(raw, override, form.rivals)
        for part in key:
            raw = raw[part]
        return raw if isinstance(raw, str) else None
    return None


def peek_device(form: Form[Any], path: Path | None, overrides: Sequence[str]) -> Literal["auto", "cpu", "cuda"]:
    """Where to compute, which ranks must know before they meet, and so before they read the recipe as a whole."""
    device = peek(form, path, overrides, "parallel", "device")
    return "cpu" if device == "cpu" else "cuda" if device == "cuda" else "auto"


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Reads `--section.key value`, `--section.key=value`, or `--section.key` alone for true.

    Returns the values, and a fault for everything else.
    """
    overrides, faults = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not re.fullmatch(r"--[A-Za-z_][^=\s]*(=.*)?", argument, re.DOTALL):
            place = "; name files ahead of such values" * Path(argument).is_file()
            faults.append(f"{argument}: not understood; a value of the recipe is given as --section.key value{place}")
            continue
        name, equals, text = argument[2:].partition("=")
        bare = not equals and (not rest or rest[0].startswith("--"))
        value = True if bare else parse_value(text if equals else rest.pop(0))
        overrides.append(Override(parse_key(name), value, bare))
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


def put(raw: dict[str, Any], override: Override, rivals: Mapping[str, tuple[str, ...]]) -> str | None:
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
        for rival in rivals.get(str(last), ()) if override.key[0] != FOREIGN else ():
            table.pop(rival, None)
        if override.value == "" and last in table:
            del table[last]
        else:
            table[str(last)] = override.value
    elif isinstance(table, list) and isinstance(last, int) and last < len(table):
        table[last] = override.value
    else:
        return _no_place(table, override.key, len(override.key) - 1)
    return None


def find_rivals(given: Sequence[Override], rivals: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Finds flags that another flag, which excludes them, follows on the command line."""
    keys = [override.key for override in given if override.value != "" and override.key[0] != FOREIGN]
    for number, key in enumerate(keys):
        for rival in rivals.get(str(key[-1]), ()):
            if (other := (*key[:-1], rival)) in keys[:number]:
                yield f"--{dotted(other)}: --{dotted(key)} is given too; keep one of them"


def _no_place(table: Any, key: Key, depth: int) -> str:
    above = dotted(key[:depth])
    if isinstance(table, list):
        there = f"0 to {len(table) - 1}" if table else "none"
        return f"--{dotted(key)}: no number {key[depth]} in {above}; there is {there}"
    return f"--{dotted(key)}: {above} is {show_value(table)}, not a table"


def _mentions(fault: str, key: Key) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(dotted(key))}(?![\w])", fault) is not None


def _validate(
    form: Form[Settings], raw: dict[str, Any], bare: Collection[Key]
) -> tuple[Settings | None, dict[Key, str]]:
    """Reads the settings as far as they can be read, and says what is wrong with those that were left out for it."""
    faults: dict[Key, str] = {}
    while True:
        try:
            return form.settings.model_validate(raw), faults
        except ValidationError as invalid:
            new = [error for error in invalid.errors() if error["loc"] not in faults]
        if not new:  # nothing more can be left out
            return None, faults
        for error in new:
            key = error["loc"]
            if key not in faults:  # the first fault of a value is told
                faults[key] = explain(error, key in bare, form.settings)
                _leave_out(raw, key, form.stand_ins)


def _leave_out(raw: Any, key: tuple[Any, ...], stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
    """Removes a value, or puts a stand-in where one must be; a list goes as a whole, except for one of tables."""
    stand_in = stand_ins.get(key[0], {})
    for depth, part in enumerate(key[:-1]):
        if isinstance(raw, dict) and part not in raw:
            return  # it has gone with another fault of its list
        if isinstance(raw[part], list) and (depth or not stand_in):
            del raw[part]
            return
        raw = raw[part]
    last = key[-1]
    if isinstance(raw, list):
        raw[last] = dict(stand_in)
    elif last in stand_in:
        raw[last] = stand_in[str(last)]
    else:
        raw.pop(last, None)
