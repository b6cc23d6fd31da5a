"""Splits paragraphs into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

import sentencex

from data_prep.readers.abbreviations import rejoin

WHITE_SPACE = re.compile(r"\s{2,}|[^\S ]")  # all but single spaces, of which there are many
SENTENCE_END = re.compile(r"(?<=[.!?。！？]) +")


def split_sentences(language: str, passages: Iterable[str]) -> list[str]:
    """Lists the sentences of paragraphs in their order, none of them empty."""
    parted = [_segment(language, passage) for passage in passages]
    rejoin(language, parted)
    return list(filter(None, map(str.strip, chain.from_iterable(parted))))


def _segment(language: str, passage: str) -> list[str]:
    """Splits one paragraph into sentences, whatever is in it.

    sentencex stumbles over white space of several bytes, such as a no-break space before a full stop, so it is given
    plain spaces. Should it stumble all the same, one paragraph in a corpus is split at its full stops instead.
    """
    text = passage if passage.isascii() else WHITE_SPACE.sub(" ", passage)
    try:
        return list(sentencex.segment(language, text))
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a fault in its compiled code raises
            raise
        return SENTENCE_END.split(text)
