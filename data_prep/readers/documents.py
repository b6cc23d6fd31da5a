"""A document: the unit that readers produce and that everything after them keeps whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text with its name, in the order in which it was written."""

    id: str
    title: str
    passages: list[str]
    """paragraphs; sentences where the reader's format has one on each line"""
