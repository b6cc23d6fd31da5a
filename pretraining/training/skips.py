"""Batches that a run skips because training diverged on them, as noted in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.common.errors import DamageError
from data_prep.common.files import read_json, write_json

SKIPPED = "skipped.json"


@dataclass(frozen=True)
class Skip:
    """Consecutive batches of a phase that are skipped."""

    phase: int
    """number of the phase, counted from 0"""
    first: int
    """number of the first batch in the order of the phase"""
    count: int
    reason: str


def read_skips(run: Path) -> list[Skip]:
    """Reads the skipped batches of a run; each entry is one return to a checkpoint."""
    try:
        return [Skip(**skip) for skip in read_json(run / SKIPPED)]
    except FileNotFoundError:
        return []
    except TypeError as error:
        raise DamageError(f"{run / SKIPPED}: not a list of batches to leave out") from error


def write_skips(run: Path, skips: Sequence[Skip]) -> None:
    write_json(run / SKIPPED, [asdict(skip) for skip in skips])
