"""TOML, read and written: recipes, the values of the command line, and values in messages."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Key = tuple[str | int, ...]
"""Where a value stands in a recipe: ("phases", 0, "learning_rate")."""


def dotted(key: Key) -> str:
    """The key as the command line writes it: phases.0.learning_rate."""
    return ".".join(map(str, key))


def read_toml(text: str) -> dict[str, Any]:
    """Reads a file's text; ValueError where it is no TOML, or nested deeper than the parser can follow."""
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return content


def toml_text(table: dict[str, Any]) -> str:
    """Writes a file."""
    return "\n".join(_lines(table)) + "\n"


def toml_value(value: Any) -> str:
    """Writes a value on one line."""
    if isinstance(value, str):
        # a character that a terminal would not show is written as its number
        return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(value, ensure_ascii=False))
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_name(name)} = {toml_value(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def show_value(value: Any) -> str:
    """A value as messages show it: not too long."""
    text = toml_value(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _lines(table: dict[str, Any], above: Key = ()) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it."""
    inner = {name: value for name, value in table.items() if isinstance(value, dict) or _is_tables(value)}
    for name, value in table.items():
        if name not in inner:
            yield f"{_name(name)} = {toml_value(value)}"
    for name, value in inner.items():
        key = (*above, _name(name))
        for inner_table in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{dotted(key)}]]" if isinstance(value, list) else f"[{dotted(key)}]"
            yield from _lines(inner_table, key)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
