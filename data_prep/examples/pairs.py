"""Decides which pieces make up a training example: segments A and B, by the rules of the original generator.

Sentences are gathered until a target length is reached or the document ends. In half of the cases B is what follows
A in the document; in the other half it is drawn from another document, and the sentences that were not used are put
back. What is too long loses pieces from the longer part, at its front or its back.

Two passes, because a partner can be any document of the corpus and so lies in another file:
`plan_segments` decides everything that depends on the document itself, `place_partners` finds the partners' sentences,
for all the examples whose partner lies in one file, in one sweep. A segment is a range of pieces in its file.

The other way of making examples is without pairs: whole sentences, as many as fit, of one document (DOC-SENTENCES of
the paper of RoBERTa) or of one document after another (FULL-SENTENCES).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import Array, ranges
from data_prep.common.compiled import compiled, copy_items
from data_prep.examples.parts import Pool
from data_prep.examples.streams import begin_stream, count_heads, draw_below, draw_bits, draw_uniform
from data_prep.vocabulary.tokens import Corpus

PARTNER_DRAWS = 10  # attempts to find a document other than one's own
COLUMNS = 8


class Segments(NamedTuple):
    """Where the segments of several examples lie: every column an array, with an entry for each example."""

    row: Array  # the document, as a row of its file
    a_start: Array  # segment A, a range of the file's pieces
    a_end: Array
    b_start: Array  # segment B likewise: of this file, or of the partner's
    b_end: Array
    partner: Array  # the number of the document that B was drawn from, -1 where B is the true next
    wanted: Array  # pieces wanted from the partner
    state: Array  # the example's own stream of random numbers, uint64

    @classmethod
    def from_columns(cls, columns: Array) -> Segments:
        """Takes the columns from the (COLUMNS, examples) int64 matrix that the compiled code fills."""
        return cls._make([*columns[:-1], columns[-1].view(np.uint64)])


def plan_segments(
    corpus: Corpus, rows: Array, pool: Pool | None, length: int, duplicate: int, seed: int, short: float
) -> Segments:
    """Plans the examples of the documents `rows`: pairs, whose partners are drawn from a pool.

    Without a pool they have one segment: whole sentences up to the length; a sentence that is longer is cut.
    """
    limits = (length - (3 if pool else 2), seed, length, duplicate, short)
    columns = _plan_pairs(corpus, rows, pool, limits) if pool else _plan_sentences(corpus, rows, limits)
    return Segments.from_columns(columns)


def plan_joined(
    corpus: Corpus, rows: Array, joined: Corpus, length: int, duplicate: int, seed: int, short: float
) -> Segments:
    """Plans the examples of the documents `rows` that go on from one into the next: ranges of their joined pieces."""
    return Segments.from_columns(_plan_joined(corpus, rows, joined, (length - 2, seed, length, duplicate, short)))


def join_documents(corpus: Corpus, rows: Array, separator: int) -> Corpus:
    """Copies the documents `rows`, which ascend, one after another; a separator is then the last piece of each."""
    counts, sizes = np.diff(corpus.document_ends, prepend=0), np.diff(corpus.sentence_ends, prepend=0)
    sentences = ranges((corpus.document_ends - counts)[rows], counts[rows])
    ends, document_ends = np.cumsum(sizes[sentences]), np.cumsum(counts[rows])
    chosen = np.zeros(len(sizes), bool)
    chosen[sentences] = True
    pieces = np.insert(corpus.pieces[np.repeat(chosen, sizes)], ends[document_ends - 1], separator)
    ends += np.repeat(np.arange(len(rows)), counts[rows])  # the separators before
    ends[document_ends - 1] += 1
    arrays = pieces, ends.astype(np.int32), document_ends.astype(np.int32)
    for array in arrays:
        array.flags.writeable = False  # as those that are mapped, so that nothing is compiled twice
    return Corpus(*arrays, corpus.first, corpus.books[rows])


@compiled
def _begin_document(corpus, row, limits):
    """Begins the stream of a document, and draws its target length: mostly all the room there is, sometimes less.

    Returns both, with the first sentence of the document, the last one, and the first piece.
    """
    room, seed, length, duplicate, short = limits
    state = begin_stream(seed, length, duplicate, corpus.first + row)
    target = 2 + draw_below(state, room - 1) if draw_uniform(state) < short else np.int64(room)
    sentence = np.int64(corpus.document_ends[row - 1] if row else 0)
    start = np.int64(corpus.sentence_ends[sentence - 1] if sentence else 0)
    return state, target, sentence, np.int64(corpus.document_ends[row] - 1), start


@compiled
def _make_columns(corpus):
    """Makes room for as many examples as different documents can have: each ends a sentence, or takes two pieces.

    What is not filled in takes no memory.
    """
    return np.empty((COLUMNS, corpus.sentence_ends.size + corpus.pieces.size // 2), np.int64)


@compiled
def _fill_example(columns, at, row, a_start, a_end, b_start, b_end, partner, wanted, state):
    """Fills in the columns of an example."""
    columns[0, at], columns[1, at], columns[2, at], columns[3, at], columns[4, at] = row, a_start, a_end, b_start, b_end
    columns[5, at], columns[6, at], columns[7, at] = partner, wanted, np.int64(draw_bits(state))


@compiled
def _plan_pairs(corpus, rows, pool, limits):
    """Fills the columns of a plan of pairs, all but where the partners' segments lie."""
    sentence_ends, columns = corpus.sentence_ends, _make_columns(corpus)
    count = 0
    for row in rows:
        state, target, sentence, last, start = _begin_document(corpus, row, limits)
        begin = sentence  # the first sentence gathered, as `start` is the first piece
        while sentence <= last:
            end = sentence_ends[sentence]
            if sentence < last and end - start < target:
                sentence += 1
                continue
            gathered = sentence - begin + 1
            kept = 1 + draw_below(state, gathered - 1) if gathered > 1 else 1
            a_end = sentence_ends[begin + kept - 1]
            random_next = gathered == 1 or draw_uniform(state) < 0.5
            if random_next:
                partner, wanted = _draw_partner(state, pool, corpus.books, corpus.first, row), target - (a_end - start)
                _fill_example(columns, count, row, start, a_end, 0, 0, partner, wanted, state)
                sentence = begin + kept  # the sentences that were not used are put back
            else:
                _fill_example(columns, count, row, start, a_end, a_end, end, -1, 0, state)
                sentence += 1
            count += 1
            begin = sentence
            start = sentence_ends[begin - 1]
    return columns[:, :count].copy()


@compiled
def _draw_partner(state, pool, books, first, row):
    """Draws another document, of another book.

    After some attempts it takes what it drew, as the original does; or where a book has several rows, the next row of
    another book, if there is any.
    """
    several = (row > 0 and books[row - 1] == books[row]) or (row + 1 < books.size and books[row + 1] == books[row])
    group, rank, partner = np.int64(0), np.int64(0), np.int64(0)
    for draws in range(PARTNER_DRAWS + (books.size if several else 0)):
        if draws < PARTNER_DRAWS:
            group = draw_below(state, pool.firsts.size) if pool.firsts.size > 1 else 0
            rank = draw_below(state, pool.sizes[group])
        else:
            rank = (rank + 1) % pool.sizes[group]
        partner = find_ranked_document(pool, pool.firsts[group] + rank)
        here = partner - first
        if here < 0 or here >= books.size or books[here] != books[row]:
            break
    return partner


@compiled
def find_ranked_document(pool, rank):
    """Finds the number of the document that has a rank in the pool."""
    if not pool.training:
        return np.int64(pool.held_out[rank])
    low, high = 0, pool.held_out.size  # of the documents held out, `low` are before the one looked for
    while low < high:
        middle = (low + high) // 2
        if pool.held_out[middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return np.int64(rank + low)


@compiled
def _plan_sentences(corpus, rows, limits):
    """Fills the columns of a plan of single segments."""
    sentence_ends, columns = corpus.sentence_ends, _make_columns(corpus)
    count = 0
    for row in rows:
        state, target, sentence, last, start = _begin_document(corpus, row, limits)
        while sentence <= last:
            end = start
            while sentence <= last and sentence_ends[sentence] - start <= target:
                end = sentence_ends[sentence]
                sentence += 1
            if end == start:  # not even one sentence fits
                end = start + target
            _fill_example(columns, count, row, start, end, 0, 0, -1, 0, state)
            count += 1
            start = end
    return columns[:, :count].copy()


@compiled
def _plan_joined(corpus, rows, joined, limits):
    """Fills the columns of a plan of single segments that go on from document to document of those that are joined.

    An example has the stream and the target length of the document in which it begins. No example begins or ends with
    a separator.
    """
    ends, columns = joined.sentence_ends, _make_columns(joined)
    count, sentence, start = 0, 0, np.int64(0)
    for document in range(rows.size):
        if sentence >= joined.document_ends[document]:  # all of it is in an example that began earlier
            continue
        state, target, _, _, _ = _begin_document(corpus, rows[document], limits)
        while sentence < joined.document_ends[document]:
            end, after, other = start, start, document
            while sentence < ends.size:
                is_last = sentence + 1 == joined.document_ends[other]
                if ends[sentence] - is_last - start > target:
                    break
                end, after = ends[sentence] - is_last, np.int64(ends[sentence])
                sentence, other = sentence + 1, other + is_last
            if end == start:  # not even one sentence fits
                end, after = start + target, start + target
            _fill_example(columns, count, rows[document], start, end, 0, 0, -1, 0, state)
            count += 1
            start = after
    return columns[:, :count].copy()


@compiled
def place_partners(chosen: Array, segments: Segments, corpus: Corpus) -> None:
    """Finds segment B of the chosen examples, whose partners all lie in this corpus."""
    for example in chosen:
        row = segments.partner[example] - corpus.first
        begin = corpus.document_ends[row - 1] if row else 0
        stop = corpus.document_ends[row]
        sentence = begin + draw_below(segments.state[example : example + 1], stop - begin)
        start = corpus.sentence_ends[sentence - 1] if sentence else 0
        while sentence < stop - 1 and corpus.sentence_ends[sentence] - start < segments.wanted[example]:
            sentence += 1
        segments.b_start[example], segments.b_end[example] = start, corpus.sentence_ends[sentence]


@compiled
def truncate(chosen: Array, segments: Segments, room: int) -> None:
    """Shortens segments until they fit: drops pieces of the longer, or of B where both are as long, at either end.

    How many pieces a segment loses follows from the lengths; only the end that a piece is taken from is random.
    """
    for example in chosen:
        size_a = segments.a_end[example] - segments.a_start[example]
        size_b = segments.b_end[example] - segments.b_start[example]
        excess = size_a + size_b - room
        if excess <= 0:
            continue
        from_longer = min(excess, abs(size_a - size_b))
        lost_a = (from_longer if size_a > size_b else 0) + (excess - from_longer) // 2
        lost_b = excess - lost_a
        state = segments.state[example : example + 1]
        front_a, front_b = count_heads(state, lost_a), count_heads(state, lost_b)
        segments.a_start[example] += front_a
        segments.a_end[example] -= lost_a - front_a
        segments.b_start[example] += front_b
        segments.b_end[example] -= lost_b - front_b


@compiled
def fill_second(chosen: Array, segments: Segments, corpus: Corpus, second: Array) -> None:
    """Truncates the chosen examples, whose segments B lie in this corpus, and copies those segments."""
    truncate(chosen, segments, second.shape[1])
    for example in chosen:
        copy_items(second[example], 0, corpus.pieces, segments.b_start[example], segments.b_end[example])
