"""Puts the segments of examples together, masks them and sorts them by random keys.

The keys make the global shuffle: every example has one from its own stream of random numbers, the examples of a file
are stored in its order, and a shard is all the examples of the corpus in one range of keys, sorted (merging.py). So
shards come out uniformly shuffled over the whole corpus, and the corpus is never in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data_prep.arrow_files import Lists, make_example_batch
from data_prep.common.arrays import Array
from data_prep.common.compiled import compiled, copy_items
from data_prep.examples.masking import Masking, mask_example
from data_prep.examples.pairs import Segments
from data_prep.examples.parting import Parted, count_use
from data_prep.examples.streams import draw_bits
from data_prep.shards import Counts, ShardSet
from data_prep.vocabulary.vocabulary import Special

KEY = "key"  # the column of the keys


class Draft(NamedTuple):
    """The examples of one set of shards, from one file of documents, when their segments are known."""

    shards: ShardSet
    rows: Array  # the documents that they are made of
    segments: Segments
    second: Array  # (examples, room) the pieces of segment B


class Finished(NamedTuple):
    """The examples of one set of shards, from one file of documents, and what they count."""

    batch: pa.RecordBatch
    counts: Counts


def add_keys(schema: pa.Schema) -> pa.Schema:
    """Adds the keys to the columns of examples, which have them until they are in shards."""
    return schema.append(pa.field(KEY, pa.uint64(), nullable=False))


def finish_examples(
    draft: Draft, own: Parted, special: Special, masking: Masking, schema: pa.Schema, pairs: bool
) -> Finished:
    """Puts the segments of the examples together, masks them, and sorts the examples by their keys.

    `schema` has the columns of the examples, with the keys.
    """
    segments, corpus = draft.segments, own.corpus
    num_specials = 3 if pairs else 2
    sizes = (segments.a_end - segments.a_start) + (segments.b_end - segments.b_start) + num_specials
    position = schema.field("masked").type.value_type.field("position").type.to_pandas_dtype()
    pieces = np.empty(sizes.sum(), schema.field("pieces").type.value_type.to_pandas_dtype())
    most = int(masking.predictions[sizes].sum())
    positions = np.empty(most, np.uint16)  # of one type, so that the loop is compiled once for all lengths
    labels = np.empty(most, pieces.dtype)
    keys = _keys(segments.state)
    order = np.argsort(keys, kind="stable")
    ends, masked_ends, boundary, split = _assemble(
        order, segments, corpus, draft.second, special, masking, pairs, pieces, positions, labels
    )
    masked = int(masked_ends[-1]) if len(order) else 0
    random_next = segments.partner[order] >= 0
    lists = Lists(pieces, ends), positions[:masked].astype(position), Lists(labels[:masked], masked_ends)
    columns = boundary, random_next, corpus.first + segments.row[order], keys[order]
    counts = Counts(
        examples=len(order),
        pieces=len(pieces),
        masked=masked,
        split=split.tolist(),
        random_next=int(random_next.sum()),
        histogram=np.bincount(sizes, minlength=draft.shards.length + 1).tolist(),
        **count_use(segments, draft.rows, own),
    )
    return Finished(make_example_batch(schema, *lists, *columns), counts)


@compiled
def _keys(states):
    """Draws the keys of all examples from their streams of random numbers."""
    keys = np.empty(states.size, np.uint64)
    for example in range(states.size):
        keys[example] = draw_bits(states[example : example + 1])
    return keys


@compiled
def _assemble(order, segments, corpus, second, special, masking, pairs, pieces, positions, labels):
    """Writes the examples into `pieces`, `positions` and `labels`.

    Returns where the pieces and the labels of every example end, where its segment B begins, and how many pieces were
    masked, replaced and kept.
    """
    ends, masked_ends = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    boundaries = np.empty(order.size, np.int64)
    split = np.zeros(3, np.int64)
    candidates = np.empty(masking.predictions.size, np.int64)
    words = np.empty(masking.predictions.size + 1, np.int64)
    at, masked = 0, 0
    for index in range(order.size):
        example = order[index]
        start, size = at, segments.a_end[example] - segments.a_start[example]
        pieces[at] = special.cls
        copy_items(pieces, at + 1, corpus.pieces, segments.a_start[example], segments.a_end[example])
        pieces[at + 1 + size] = special.sep
        at += size + 2
        boundary = at - start
        if pairs:
            size = segments.b_end[example] - segments.b_start[example]
            copy_items(pieces, at, second[example], 0, size)
            pieces[at + size] = special.sep
            at += size + 1
        state = segments.state[example : example + 1]
        masked += mask_example(
            state, pieces[start:at], boundary, masking, candidates, words, positions[masked:], labels[masked:], split
        )
        ends[index], masked_ends[index], boundaries[index] = at, masked, boundary
    return ends, masked_ends, boundaries, split
