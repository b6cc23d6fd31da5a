"""Compares what was read from a JSON file with the form that it must have, before anything relies on it.

A form is a type; a check such as COUNT; a list with the form of its items; or a dictionary with the forms of its keys.
Keys that a form does not name may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LONGEST_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True)
class Check:
    """What a value must be, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int = 2**63 - 1) -> Check:
    """Makes the check of a whole number within bounds."""
    return Check(
        f"a whole number from {least:,}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


COUNT = whole(0)
NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def find_fault(value: Any, form: Any, place: str = "") -> str | None:
    """Says what is wrong with the first part of a value that has not its form; nothing where all have theirs."""
    return next(_faults(value, form, place), None)


def _faults(value: Any, form: Any, place: str) -> Iterator[str]:
    """Goes through a value and finds its faults one by one."""
    if isinstance(form, Check):
        if not form.holds(value):
            yield _wrong(value, form.words, place)
    elif isinstance(form, type):
        if not isinstance(value, form):
            yield _wrong(value, NAMES[form], place)
    elif not isinstance(value, type(form)):
        yield _wrong(value, NAMES[type(form)], place)
    elif isinstance(form, list):
        for index, item in enumerate(value):
            yield from _faults(item, form[0], f"{place}[{index}]")
    else:
        for name, inner in form.items():
            if name in value:
                yield from _faults(value[name], inner, f"{place}.{name}" if place else name)
            else:
                yield f"{place or 'it'} lacks {name}"


def _wrong(value: Any, words: str, place: str) -> str:
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return f"{place or 'it'} is {shown[:LONGEST_SHOWN]}, not {words}"
