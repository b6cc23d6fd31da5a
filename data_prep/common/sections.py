"""Settings of a table that users write: the types of their values, and how they become files again.

A table may join the settings of several kinds. Each file of a folder declares one, so that a new file needs no line
elsewhere.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from data_prep.common.errors import UserError
from data_prep.common.toml_text import show_value, toml_text


def whole(value: Any) -> Any:
    """Takes a whole number written with a point or an exponent, such as 1e6, for the int that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1, lt=2**31), BeforeValidator(whole)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Removed(NamedTuple):
    """A setting that was removed."""

    value: Any
    """The value that always applies now; None if no value is accepted."""
    why: str
    """What to do instead, or why nobody needs another value."""

    def allows(self, value: Any) -> bool:
        """Returns whether a value from a file or a command line is the one that always applies now."""
        if isinstance(self.value, Mapping) and isinstance(value, Mapping):
            value = {**self.value, **value}
        return self.value is not None and _spell(value) == _spell(self.value)

    def count_words(self) -> int:
        """Returns how many words a command line has for the value."""
        return len(self.value) if isinstance(self.value, list | tuple) else 1

    def explain(self) -> str:
        """Explains why another value is refused; the text follows the setting and its value in a message."""
        always = "" if self.value is None else f"; it is always {_spell(self.value)}"
        return f"is no longer a setting{always}: {self.why}"


RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Where launchers say which rank a process is."""


@cache
def tell_removed(said: str) -> None:
    """Prints, once and on the first rank only, that a setting was removed and has this value."""
    if all(os.environ.get(name, "0") == "0" for name in RANKS):
        print(f"{said}: is no longer a setting: this value always applies", file=sys.stderr)


def _spell(value: Any) -> str:
    """Spells a value in one way, whether it comes from a file, a flag or the code."""
    if isinstance(value, list | tuple):
        return " ".join(map(_spell, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_spell(each)}" for name, each in value.items())
    if isinstance(value, bool) or str(value) in ("True", "False"):
        return str(value).lower()
    try:
        return repr(float(value)).removesuffix(".0")
    except (TypeError, ValueError):
        return " ".join(map(_spell, str(value).split())) if " " in str(value) else str(value)


class Section(BaseModel):
    """A table of settings, which takes nothing unknown, converts nothing and never changes.

    It accepts a removed setting that has the value that always applies now, as do classes that derive from it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    removed: ClassVar[Mapping[str, Removed]] = {}
    """Removed settings by name."""

    @classmethod
    def list_removed(cls) -> dict[str, Removed]:
        """Lists the removed settings of this table and of those that it joins."""
        return {name: gone for each in cls.__mro__ for name, gone in vars(each).get("removed", {}).items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, values: Any) -> Any:
        removed = cls.list_removed()
        if not isinstance(values, dict) or removed.keys().isdisjoint(values):
            return values
        return {name: each for name, each in values.items() if name not in removed or not removed[name].allows(each)}

    def as_dict(self) -> dict[str, Any]:
        """All settings, defaults included, in the types of TOML and JSON, which are read back as the same."""
        return self.model_dump(mode="json", exclude_none=True)

    def as_toml(self) -> str:
        """All settings as a file that reads back as the same."""
        return toml_text(self.as_dict())


@dataclass(frozen=True)
class InsteadOf:
    """Fact about a setting: given on the command line, it removes these settings from what the file says. Their names
    are dotted, from the table of the setting on."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class ShortFlag:
    """Fact about a setting: the command has a shorter flag for it, which messages name."""

    flag: str


class May(Enum):
    """Facts about settings that need not be as they were before."""

    CHANGE_BETWEEN_STARTS = "It changes how a run is done, not what is trained."
    DIFFER_FROM_BASE = "A model may have another value than the one that it begins with."


Kind = TypeVar("Kind")


def find_facts(settings: type[BaseModel], kind: type[Kind]) -> dict[str, Kind]:
    """Maps the settings whose annotations have a fact of this kind to it, in the order of the settings."""
    return {
        name: fact for name, field in settings.model_fields.items() for fact in field.metadata if isinstance(fact, kind)
    }


def list_settings(settings: type[BaseModel], *facts: Enum) -> list[str]:
    """Lists the settings whose annotations have any of these facts, in their order."""
    return [name for name, field in settings.model_fields.items() if any(fact in field.metadata for fact in facts)]


class NamedSection(Section):
    """A table whose `name` says which of several kinds it is about, and so which of its other settings count."""

    name: str


Settings = TypeVar("Settings", bound=Section)


def declared_in(file: str, package: str, attribute: str) -> dict[str, Any]:
    """What the modules beside `file` have under this name, by the modules' names; those that have it not are left out.

    All of them are imported, so that none may load what takes long, such as PyTorch.
    """
    found = (path.stem for path in Path(file).parent.glob("*.py"))
    names = sorted(name for name in found if name.isidentifier() and name not in ("__init__", Path(file).stem))
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: getattr(module, attribute) for name, module in modules.items() if hasattr(module, attribute)}


def find_declared(kinds: Mapping[str, Kind], name: str, key: str, folder: str) -> Kind:
    """Finds what the module of this name in a folder declares, which a recipe or a checkpoint names by its `key`."""
    if name not in kinds:
        raise UserError(f'{key} = "{name}": there is {", ".join(kinds)}; put back {folder}/{name}.py, which it was')
    return kinds[name]


def own_settings(kind: type[Section], common: type[Section]) -> list[str]:
    """The names of the settings that others do not have."""
    return [name for name in kind.model_fields if name not in common.model_fields]


def joined_settings(
    title: str,
    common: type[Settings],
    kinds: Mapping[str, type[Settings]],
    default: str,
    meaning: str,
    module: str,
    key: str = "name",
    **more: Any,
) -> type[Settings]:
    """A table with the settings of all kinds, as a class of this title and module; its `key` is the name of a kind.
    `more` are types and fields that replace those of `common`.

    UserError where two kinds have a setting of one name, which one of them would lose.
    """
    owners: dict[str, str] = {}
    for kind, settings in kinds.items():
        for name in own_settings(settings, common):
            other = owners.setdefault(name, kind)
            if _origin(kinds[other], name) is not _origin(settings, name):
                raise UserError(f"{kind}.py has a setting {name}, as {other}.py has; give one of them another name")
    every = dict.fromkeys(kinds.values())
    bases = [one for one in every if not any(other is not one and issubclass(other, one) for other in every)]
    named: Any = (Literal[tuple(kinds)], Field(default, description=meaning))
    return create_model(title, __base__=tuple(bases), __module__=module, __doc__=common.__doc__, **{key: named}, **more)


def _origin(settings: type[Section], name: str) -> type:
    """The class in which a setting is written down."""
    return next(kind for kind in settings.__mro__ if name in get_annotations(kind))


def foreign_values(
    section: str,
    settings: Settings,
    common: type[Settings],
    kinds: Mapping[str, type[Settings]],
    key: str = "name",
    used: Sequence[str] = (),
) -> Iterator[str]:
    """Yields a fault for each setting that differs from its default and belongs neither to the chosen kind nor to a
    kind in `used`; it names the kinds that have the setting."""
    chosen = getattr(settings, key)
    known = {name for kind in (chosen, *used) for name in kinds[kind].model_fields}
    owners: dict[str, list[str]] = {}
    for other, kind in kinds.items():
        for name in own_settings(kind, common):
            if name not in known and getattr(settings, name) != kind.model_fields[name].default:
                owners.setdefault(name, []).append(f'"{other}"')
    for name, others in owners.items():
        where = f'is for {section}.{key} = {" or ".join(others)}; it is "{chosen}"'
        yield f"{section}.{name} = {show_value(getattr(settings, name))}: {where}"
