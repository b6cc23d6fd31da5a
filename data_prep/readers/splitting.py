"""Splits paragraphs into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate, chain, pairwise

import sentencex

from data_prep.readers.abbreviations import rejoin

WHITE_SPACE = re.compile(r"\s{2,}|[^\S ]")  # all but single spaces, of which there are many
SENTENCE_END = re.compile(r"(?<=[.!?。！？]) +")
CERTAIN_END = re.compile(r"[^。！？]*[。！？]+[」』）】”’]*|[^。！？]+")  # what ends no abbreviation
DOUBTFUL = 120  # characters beyond which a sentence whose marks do not pair up is looked at without them
ENCLOSING = re.compile(r"""["“”„‘’«»‹›「」《》()\[\]{}]+""")
BRACKETS, QUOTES = ("()", "[]", "{}"), ("“”„", "«»")
WRONG_WAY = re.compile(r"""(?:[^"]*"[^"]*")*(?:[^"]*[\w.,;:!?]"(?=\s)|[^"]*"[^"]*(?<=\s)"(?=\w))""")
"""Text with a quotation mark that ends where one should begin, as in 6" wide, or begins where one should end."""
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
    parts = [passage] if passage.isascii() else _parts(WHITE_SPACE.sub(" ", passage))
    found = [sentence for part in parts for sentence in _segment_text(language, part)]
    if max(map(len, found), default=0) <= DOUBTFUL:
        return found
    return [sentence for one in found for sentence in _split_quotation(language, one)]


def _split_quotation(language: str, sentence: str) -> list[str]:
    """Splits what sentencex takes for one sentence as it is enclosed, where the marks around it do not pair up.

    All between two quotation marks is one to it, and a mark that has no partner (6" wide) finds one far away. A real
    quotation stays whole, however long.
    """
    if len(sentence) <= DOUBTFUL or _pairs_up(sentence):
        return [sentence]
    parts = _segment_text(language, ENCLOSING.sub("", sentence))
    ends, left_out = [], 0  # where parts end in the sentence; characters that its parts lack so far
    marks = ENCLOSING.finditer(sentence)
    mark = next(marks, None)
    for end in accumulate(map(len, parts[:-1])):
        while mark and mark.start() - left_out < end:
            left_out += len(mark[0])
            mark = next(marks, None)
        ends.append(end + left_out)
    return [sentence[start:end] for start, end in pairwise((0, *ends, len(sentence)))]


def _pairs_up(sentence: str) -> bool:
    """Whether the marks that enclose something can be the first and the second of pairs."""
    kinds = BRACKETS if sentence.isascii() else (*BRACKETS, *QUOTES)
    if any(sum(map(sentence.count, kind)) % 2 for kind in kinds):
        return False
    straight = sentence.count('"')
    return not straight % 2 and not (straight and WRONG_WAY.match(sentence))


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
