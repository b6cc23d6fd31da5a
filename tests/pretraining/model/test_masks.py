"""Masks drawn anew: exactly so many, never the marks, of any example the same whoever reads it, and fair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.common.arrays import Array, ranges
from data_prep.common.hashing import hash_key
from pretraining.model.masks import Masked, Split, choose_places, count_masked, draw_masks, number_places
from pretraining.model.rows import Draw, Rows

VOCABULARY, MASK, CLS, SEP = 1000, 4, 2, 3
USUAL = Split(0.8, 0.1, 0.1)


def rows_of(lengths: list[int], boundaries: list[int]) -> Rows:
    """Examples whose pieces tell where they stand; the shards hide two pieces of each."""
    sizes, begins = np.array(lengths), np.array(boundaries)
    places = ranges(np.zeros_like(sizes), sizes)
    starts = np.cumsum(sizes) - sizes
    pieces = 10 + (places + 7 * np.repeat(np.arange(len(sizes)), sizes)) % (VOCABULARY - 10)
    pieces[starts], pieces[starts + begins - 1], pieces[starts + sizes - 1] = CLS, SEP, SEP
    hidden = np.tile([1, 2], len(sizes))
    labels = pieces[np.repeat(starts, 2) + hidden]
    pieces[np.repeat(starts, 2) + hidden] = MASK
    two, numbers = np.full(len(sizes), 2), np.arange(len(sizes))
    where = np.stack([np.zeros_like(numbers), numbers], axis=1)
    return Rows(where, sizes, pieces, begins, np.zeros_like(sizes), two, hidden, labels)


def draw_for(count: int, seed: int = 0) -> Draw:
    return Draw(hash_key(seed, np.arange(count)), 0.0, VOCABULARY, MASK)


def by_example(rows: Rows, masked: Masked) -> list[tuple[list[int], list[int], list[int]]]:
    """What the model sees of each example, where it predicts, and what."""
    found = []
    for start, length in zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True):
        inside = (masked.chosen >= start) & (masked.chosen < start + length)
        found.append(
            (
                masked.pieces[start : start + length].tolist(),
                (masked.chosen[inside] - start).tolist(),
                masked.labels[inside].tolist(),
            )
        )
    return found


def test_more_than_may_be_chosen_is_no_wish() -> None:
    """Of ten places two or three are marks."""
    rows = rows_of([10, 10], [10, 5])
    numbers = number_places(draw_for(2).keys, 10)
    assert len(choose_places(rows, np.array([8, 7]), numbers)[0]) == 15
    for counts in ([9, 7], [8, 8]):
        with pytest.raises(AssertionError):
            choose_places(rows, np.array(counts), numbers)


@st.composite
def examples(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(8, 60), min_size=1, max_size=12))
    boundaries = [draw(st.one_of(st.just(length), st.integers(5, length - 2))) for length in lengths]
    return rows_of(lengths, boundaries)


@settings(max_examples=60, deadline=None)
@given(rows=examples(), rate=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1))
def test_exactly_so_many_are_chosen_and_never_a_mark(rows: Rows, rate: float, seed: int) -> None:
    masked = draw_masks(rows, rate, USUAL, draw_for(len(rows.lengths), seed))
    text = rows.restore_text()
    assert (np.diff(masked.chosen) > 0).all()
    assert not set(text[masked.chosen].tolist()) & {CLS, SEP}
    assert np.array_equal(masked.labels, text[masked.chosen])
    untouched = np.setdiff1d(np.arange(len(text)), masked.chosen)
    assert np.array_equal(masked.pieces[untouched], text[untouched])
    expected = [max(1, min(round(rate * length), length - 3)) for length in rows.lengths.tolist()]
    assert [len(chosen) for _, chosen, _ in by_example(rows, masked)] == expected


@settings(max_examples=40, deadline=None)
@given(rows=examples(), rate=st.floats(0.05, 0.9), data=st.data())
def test_an_example_has_the_same_masks_whoever_reads_it(rows: Rows, rate: float, data: st.DataObject) -> None:
    """Alone, or beside any others in any order: it depends on its key and on the rate alone."""
    draw, count = draw_for(len(rows.lengths)), len(rows.lengths)
    together = by_example(rows, draw_masks(rows, rate, USUAL, draw))
    order = data.draw(st.permutations(range(count)))
    again = rows_of(rows.lengths[order].tolist(), rows.boundaries[order].tolist())
    again = replace(again, pieces=np.concatenate([rows.pieces[each] for each in stretches(rows, order)]))
    again = replace(again, labels=rows.labels.reshape(-1, 2)[order].ravel())
    found = by_example(again, draw_masks(again, rate, USUAL, replace(draw, keys=draw.keys[order])))
    assert found == [together[number] for number in order]


def stretches(rows: Rows, order: list[int]) -> list[Array]:
    return [rows.starts[number] + np.arange(rows.lengths[number]) for number in order]


def test_a_higher_rate_only_takes_more_of_the_same_ranking() -> None:
    rows, draw = rows_of([50] * 200, [20] * 200), draw_for(200)
    few, many = (set(draw_masks(rows, rate, USUAL, draw).chosen.tolist()) for rate in (0.15, 0.4))
    assert few < many
    assert (len(few), len(many)) == (200 * round(0.15 * 50), 200 * 20)


def test_shares_and_places_are_fair() -> None:
    """Within four standard deviations of what a fair draw has, for each place, and for pairs of places."""
    count, length, boundary = 20_000, 24, 10
    rows = rows_of([length] * count, [boundary] * count)
    masked = draw_masks(rows, 0.25, USUAL, draw_for(count))
    now, chosen = masked.pieces[masked.chosen], (masked.chosen % length).reshape(count, -1)
    shares = [(now == MASK).mean(), ((now != MASK) & (now != masked.labels)).mean(), (now == masked.labels).mean()]
    for found, share in zip(shares, USUAL, strict=True):
        assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / len(now)) + 0.1 / VOCABULARY
    candidates, taken = length - 3, chosen.shape[1]
    holds = np.zeros((count, length), bool)
    np.put_along_axis(holds, chosen, True, axis=1)
    usual = taken / candidates
    frequent = np.delete(holds, [0, boundary - 1, length - 1], axis=1)
    assert abs(frequent.mean(0) - usual).max() < 4 * np.sqrt(usual * (1 - usual) / count)
    together = taken * (taken - 1) / (candidates * (candidates - 1))
    pairs = (frequent.T.astype(float) @ frequent) / count
    off = pairs[~np.eye(candidates, dtype=bool)]
    assert abs(off - together).max() < 4.5 * np.sqrt(together * (1 - together) / count)  # of 210 pairs


def test_random_pieces_are_of_the_whole_vocabulary() -> None:
    rows = rows_of([60] * 4000, [60] * 4000)
    masked = draw_masks(rows, 0.5, Split(0, 1, 0), draw_for(4000))
    found = np.bincount(masked.pieces[masked.chosen], minlength=VOCABULARY)
    usual = len(masked.chosen) / VOCABULARY
    assert len(found) == VOCABULARY
    assert ((found - usual) ** 2 / usual).sum() < VOCABULARY + 4 * np.sqrt(2 * VOCABULARY)


def test_an_example_of_one_candidate_has_it() -> None:
    rows = rows_of([8], [8])
    alone = replace(rows, lengths=np.array([3]), pieces=np.array([CLS, 9, SEP]), boundaries=np.array([3]))
    assert count_masked(3, 0.15) == 1
    assert choose_places(alone, np.array([1]), number_places(draw_for(1).keys, 3))[1].tolist() == [1]
