"""Values of files that may be damaged, or of another version: what is no such value counts as not there."""

from __future__ import annotations

from typing import Any

LARGEST = 1e12
"""No step, time or figure of a run is larger."""


def is_number(value: Any) -> bool:
    """Whether something is a number that means something."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: Any) -> bool:
    """Whether something is a whole number from 0 on."""
    return isinstance(value, int) and is_number(value) and value >= 0


def sound_figures(record: Any, figures: frozenset[str], counts: frozenset[str]) -> dict[str, Any]:
    """A record without those of its figures and counts that are none."""
    if not isinstance(record, dict):
        return {}
    bad = {name for name in figures & record.keys() if not is_number(record[name])}
    bad |= {name for name in counts & record.keys() if not is_count(record[name])}
    return {name: value for name, value in record.items() if name not in bad}
