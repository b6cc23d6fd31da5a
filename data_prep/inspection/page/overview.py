"""What the page says first: what the folder is, by which settings it was made, and what to know before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_prep.inspection.figures import warnings
from data_prep.settings import Settings, flag_of
from data_prep.shards import Manifest

MOST_NAMED = 5  # sources that the title names


@dataclass(frozen=True)
class Overview:
    """A folder in a few figures."""

    title: str
    documents: int
    pieces: int
    vocabulary: int
    vocabulary_source: str
    casing: str
    examples: int
    fingerprint: str
    settings: list[str]
    """The settings that are not the usual ones, as flags."""
    warnings: list[str]


def overview_of(manifest: Manifest) -> Overview:
    """Takes from a manifest what is said first."""
    vocabulary, corpus = manifest.vocabulary, manifest.corpus
    added = vocabulary.size - (vocabulary.base_size or vocabulary.size)
    source = f"of {manifest.vocabulary_source}" if manifest.vocabulary_source else "trained from this text"
    return Overview(
        title=_title(list(dict.fromkeys(file.source for file in manifest.sources))),
        documents=corpus.documents,
        pieces=corpus.pieces,
        vocabulary=vocabulary.size,
        vocabulary_source=source + (f", with {added:,} added" if added else ""),
        casing="with case and accents" if vocabulary.cased else "in lower case",
        examples=sum(figures.examples for figures in manifest.figures),
        fingerprint=manifest.fingerprint,
        settings=list(unusual_settings(manifest)),
        warnings=list(warnings(manifest)),
    )


def _title(sources: list[str]) -> str:
    """Names the folder by its sources, which it has wherever it lies."""
    more = len(sources) - MOST_NAMED
    return ", ".join(sources[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def unusual_settings(manifest: Manifest) -> Iterator[str]:
    """Spells as flags the recorded settings that are not those of a run without flags."""
    said = manifest.settings.as_json()
    given = {name: said[name] for name in ("lengths", "mask_rate") if name in said}  # on which others rest
    usual = Settings(**given).recorded() | {name: None for name in said if name not in Settings.model_fields}
    usual |= {"lengths": Settings().recorded()["lengths"], "mask_rate": Settings().mask_rate}
    for name, value in said.items():
        if value != usual.get(name) and (value or usual.get(name)):
            yield f"{flag_of(name)} {_spelled(value)}".rstrip()


def _spelled(value: Any) -> str:
    """Spells the value of a setting as it is given on a command line."""
    if isinstance(value, dict):
        return " ".join(f"{name}={_spelled(one)}" if name else _spelled(one) for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_spelled, value))
    if isinstance(value, bool):
        return "" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
