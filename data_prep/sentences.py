"""Paragraphs to sentences."""

from __future__ import annotations

from collections.abc import Iterable

import sentencex


def split_sentences(language: str, passages: Iterable[str]) -> list[str]:
    """The sentences of some paragraphs, in their order, none of them empty."""
    segment = sentencex.segment
    sentences = (sentence.strip() for passage in passages for sentence in segment(language, passage))
    return [sentence for sentence in sentences if sentence]
