"""Splits paragraphs into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, pairwise

import sentencex

from data_prep.readers.abbreviations import rejoin

WHITE_SPACE = re.compile(r"\s{2,}|[^\S ]")  # all but single spaces, of which there are many
SENTENCE_END = re.compile(r"(?<=[.!?。！？]) +")
CERTAIN_END = re.compile(r"[^。！？]*[。！？]+[」』）】”’]*|[^。！？]+")  # what ends no abbreviation
LONG = 5000  # characters, beyond which a paragraph with such ends is divided at them


def split_sentences(language: str, passages: Iterable[str]) -> list[str]:
    """Lists the sentences of paragraphs in their order, none of them empty."""
    parted = [_segment(language, passage) for passage in passages]
    rejoin(language, parted)
    return list(filter(None, map(str.strip, chain.from_iterable(parted))))


def _segment(language: str, passage: str) -> list[str]:
    """Splits one paragraph into sentences, whatever is in it.

    sentencex stumbles over white space of several bytes, such as a no-break space before a full stop, so it is given
    plain spaces.
    """
    if passage.isascii():
        return _segment_text(language, passage)
    text = WHITE_SPACE.sub(" ", passage)
    return [sentence for part in _parts(text) for sentence in _segment_text(language, part)]


def _parts(text: str) -> list[str]:
    """Divides a very long paragraph of Chinese or Japanese, in whose length the time of sentencex is quadratic."""
    if len(text) <= LONG:
        return [text]
    ends = [0]
    for match in CERTAIN_END.finditer(text):
        if match.end() - ends[-1] > LONG:
            ends.append(match.end())
    return [part for start, end in pairwise((*ends, len(text))) if (part := text[start:end])]


def _segment_text(language: str, text: str) -> list[str]:
    """Calls sentencex; should it stumble, one paragraph in a corpus is split at its full stops instead."""
    try:
        return list(sentencex.segment(language, text))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a fault in its compiled code raises
            raise
        return SENTENCE_END.split(text)
