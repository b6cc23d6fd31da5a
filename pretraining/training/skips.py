"""Batches that a run leaves out since training went wrong on them: noted in its folder, so that they stay left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.common.errors import DamageError
from data_prep.common.files import read_json, write_json

SKIPPED = "skipped.json"


@dataclass(frozen=True)
class Skip:
    """Batches of a phase that are left out."""

    phase: int
    """number of the phase, counted from 0"""
    first: int
    """number of the first of them in the order of the phase"""
    count: int
    reason: str


def read_skips(run: Path) -> list[Skip]:
    """The batches of a run that are left out; the run went back to a checkpoint once for each entry."""
    try:
        return [Skip(**skip) for skip in read_json(run / SKIPPED)]
    except FileNotFoundError:
        return []
    except TypeError as error:
        raise DamageError(f"{run / SKIPPED}: not a list of batches to leave out") from error


def write_skips(run: Path, skips: Sequence[Skip]) -> None:
    write_json(run / SKIPPED, [asdict(skip) for skip in skips])
