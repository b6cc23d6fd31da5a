"""Parts sentences that are longer than an example has room: such a one would be cut to the example, and the rest lost.

A text without line breaks has them where quotation marks do not pair up (`6" wide`), since all between two of them is
taken for one sentence; so has a text without full stops. They are parted at their full stops, and where those are too
far apart, before words. A sentence that fits stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled
from data_prep.examples.pairs import Segments
from data_prep.vocabulary.tokens import Corpus
from data_prep.vocabulary.vocabulary import CLOSING, CONTINUES, STOP

FEWEST = 8  # pieces of a part that ends at a full stop, which in fewer belongs to a number or an abbreviation
USUAL = 25  # pieces of a part that ends before a word: as many as sentences of Wikipedia have


class Parted(NamedTuple):
    """A corpus in which every sentence fits into an example."""

    corpus: Corpus
    stretches: Array  # (stretches, 2) the ranges of pieces without full stops that were parted before words, ascending
    num_parted: int  # how many sentences were too long


def part_sentences(corpus: Corpus, marks: Array, room: int) -> Parted:
    """Parts the sentences of more than `room` pieces; `marks` classifies pieces (STOP, CLOSING, CONTINUES)."""
    sizes = np.diff(corpus.sentence_ends, prepend=0)
    too_long = sizes > room
    if not too_long.any():
        return Parted(corpus, np.empty((0, 2), np.int64), 0)
    sentence_ends = np.empty(sizes.size + sizes[too_long].sum(), np.int32)
    document_ends = np.empty_like(corpus.document_ends)
    stretches = np.empty((sizes[too_long].sum() // room + 1, 2), np.int64)
    num_sentences, num_stretches = _part_all(corpus, marks, room, sentence_ends, document_ends, stretches)
    ends = sentence_ends[:num_sentences].copy(), document_ends
    for array in ends:
        array.flags.writeable = False  # as those that are mapped, so that nothing is compiled twice
    parted = corpus._replace(sentence_ends=ends[0], document_ends=ends[1])
    return Parted(parted, stretches[:num_stretches].copy(), int(too_long.sum()))


@compiled
def _part_all(corpus, marks, room, sentence_ends, document_ends, stretches):
    """Fills in where sentences and documents end then, and the stretches that are parted before words; counts both."""
    count, num_stretches, sentence, start = 0, 0, 0, 0
    for document in range(corpus.document_ends.size):
        while sentence < corpus.document_ends[document]:
            stop = corpus.sentence_ends[sentence]
            if stop - start > room:
                count, num_stretches = _part_one(
                    corpus.pieces, marks, room, start, stop, sentence_ends, count, stretches, num_stretches
                )
            else:
                sentence_ends[count] = stop
                count += 1
            sentence, start = sentence + 1, stop
        document_ends[document] = count
    return count, num_stretches


@compiled
def _part_one(pieces, marks, room, start, stop, ends, count, stretches, num_stretches):
    """Parts one sentence after every full stop, with the marks that close it, and before words between distant ones."""
    stopped = False
    for end in range(start + 1, stop + 1):
        mark = marks[pieces[end - 1]]
        stopped = mark == STOP or (stopped and mark == CLOSING)
        if end < stop and not (stopped and end - start >= FEWEST and marks[pieces[end]] < STOP):
            continue
        if end - start > room:
            stretches[num_stretches, 0], stretches[num_stretches, 1] = start, end
            num_stretches += 1
            while end - start > min(USUAL, room):
                cut = start + min(USUAL, room)
                while cut > start + 1 and marks[pieces[cut]] == CONTINUES:
                    cut -= 1
                if marks[pieces[cut]] == CONTINUES:  # within a word that is longer than the part
                    cut = start + min(USUAL, room)
                ends[count] = cut
                count += 1
                start = cut
        ends[count] = end
        count += 1
        start = end
    return count, num_stretches


def count_use(segments: Segments | None, rows: Array, parted: Parted) -> dict[str, int]:
    """Counts the pieces of the documents `rows`, those that examples have as A or as a true B, and what is lost.

    `lost_parted` is what truncation took of sentences that had to be parted before words. Without the segments of pairs
    nothing is lost: examples of single segments have all of their documents.
    """
    corpus = parted.corpus
    borders = np.concatenate([[0], corpus.sentence_ends[corpus.document_ends - 1]])
    text = int((borders[rows + 1] - borders[rows]).sum())
    if segments is None:
        return {"text": text, "own": text, "lost_parted": 0, "parted": parted.num_parted}
    follows = segments.partner < 0
    starts = np.concatenate([segments.a_start, segments.b_start[follows]])
    ends = np.concatenate([segments.a_end, segments.b_end[follows]])
    within = _lengths_within(parted.stretches, borders[rows], borders[rows + 1])
    return {
        "text": text,
        "own": int((ends - starts).sum()),
        "lost_parted": int(within - _lengths_within(parted.stretches, starts, ends)),
        "parted": parted.num_parted,
    }


def _lengths_within(stretches: Array, starts: Array, ends: Array) -> int:
    """Adds up how much of some ranges lies within the stretches."""
    if not len(stretches):
        return 0
    total = np.cumsum(stretches[:, 1] - stretches[:, 0])
    before = np.stack([total - (stretches[:, 1] - stretches[:, 0]), total], axis=1).ravel()
    up_to = [np.interp(places, stretches.ravel(), before) for places in (starts, ends)]
    return round(float((up_to[1] - up_to[0]).sum()))
