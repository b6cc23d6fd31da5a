"""What is drawn for segments, draw by draw: as the original distributes it, and independent."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from scipy import stats
from support import original
from support.original import CHANCE, chance_alike
from support.segments import (
    ONE_PIECE_SENTENCES,
    SEED,
    Made,
    all_rows,
    corpus_of,
    first_of_each,
    make,
    plan_of,
    pool_of,
    starts_of,
    truncated,
)

from data_prep.common.arrays import Array
from data_prep.examples.pairs import plan_pairs


def test_ten_draws_are_made_for_another_document() -> None:
    """Where there are two documents, a document is its own partner once in 2¹⁰."""
    corpus = corpus_of([[5]] * 2)
    times = 80_000
    members = pool_of(corpus)
    plans = [plan_pairs(corpus, all_rows(corpus), members, 16, number, SEED, 0.0) for number in range(times // 2)]
    own = sum(int((plan.partner == plan.row).sum()) for plan in plans)
    assert stats.binomtest(own, times, 2**-10).pvalue > CHANCE


def targets_of(made: Made) -> Array:
    """Works out the targets of the documents of ONE_PIECE_SENTENCES from their first examples."""
    whole = made.whole
    gathered = np.where(whole.partner < 0, whole.b_end, whole.a_end + whole.wanted) - whole.a_start
    targets: Array = gathered[first_of_each(whole.row)]
    return targets


def test_short_targets_are_uniform() -> None:
    made = make(corpus_of(ONE_PIECE_SENTENCES), 16, short=1.0)
    targets = targets_of(made)
    assert (targets.min(), targets.max()) == (2, 13)
    assert stats.chisquare(np.bincount(targets - 2, minlength=12)).pvalue > CHANCE


@pytest.mark.parametrize("short", [0.1, 0.5])
def test_so_many_documents_have_short_targets(short: float) -> None:
    targets = targets_of(make(corpus_of(ONE_PIECE_SENTENCES), 64, short=short))
    assert targets.max() == 61
    assert stats.binomtest(int((targets < 61).sum()), targets.size, short * 59 / 60).pvalue > CHANCE


def test_a_document_has_one_target() -> None:
    made = make(corpus_of(ONE_PIECE_SENTENCES[:100]), 64, short=1.0)
    whole, targets = made.whole, targets_of(made)
    random_next = whole.partner >= 0
    found = (whole.a_end - whole.a_start + whole.wanted)[random_next]
    np.testing.assert_array_equal(found, targets[whole.row[random_next]])


def test_a_ends_after_any_but_the_last_of_the_sentences_gathered() -> None:
    whole = make(corpus_of([[2] * 7] * 3000), 64).whole
    first = first_of_each(whole.row)
    kept = (whole.a_end - whole.a_start)[first] // 2
    random_next = whole.partner[first] >= 0
    table = np.array([np.bincount(kept[random_next == side], minlength=8)[1:7] for side in (False, True)])
    assert table.sum() == 3000
    assert stats.chisquare(table.sum(axis=0)).pvalue > CHANCE
    assert stats.chi2_contingency(table).pvalue > CHANCE  # how many, and whether the next is random, are unrelated


def test_half_of_the_examples_have_a_random_next() -> None:
    whole = make(corpus_of([[2, 2]] * 10_000), 64).whole
    first = first_of_each(whole.row)
    random_next = whole.partner[first] >= 0
    assert stats.binomtest(int(random_next.sum()), 10_000).pvalue > CHANCE
    rest = np.setdiff1d(np.arange(whole.row.size), first)
    np.testing.assert_array_equal(whole.row[rest], np.flatnonzero(random_next))  # the sentence that was put back
    assert (whole.partner[rest] >= 0).all()  # has nothing that follows it


def test_partners_are_uniform_over_the_other_documents() -> None:
    corpus = corpus_of([[3]] * 12)
    members, times = pool_of(corpus), 500
    plans = [plan_pairs(corpus, all_rows(corpus), members, 16, number, SEED, 0.0) for number in range(times)]
    apart = np.concatenate([(plan.partner - plan.row) % 12 for plan in plans])
    counts = np.bincount(apart, minlength=12)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > CHANCE
    partners = np.bincount(np.concatenate([plan.partner for plan in plans]), minlength=12)
    assert stats.chisquare(partners).pvalue > CHANCE


def test_a_random_next_begins_at_any_sentence() -> None:
    corpus, _, whole, _ = make(corpus_of([[5, 1, 9, 2, 2, 40, 3]] * 1000), 32)
    random_next = whole.partner >= 0
    sentence = np.searchsorted(starts_of(corpus.sentence_ends), whole.b_start[random_next])
    assert stats.chisquare(np.bincount(sentence % 7, minlength=7)).pvalue > CHANCE
    np.testing.assert_array_equal(sentence // 7, whole.partner[random_next])


def test_what_is_drawn_for_an_example_tells_nothing_of_the_next() -> None:
    corpus, _, whole, _ = make(corpus_of([[2] * 40] * 1000), 17)
    kept = (whole.a_end - whole.a_start) // 2
    start_of_b = np.searchsorted(starts_of(corpus.sentence_ends), whole.b_start) % 40
    pairs = np.flatnonzero((whole.partner[:-1] >= 0) & (whole.row[:-1] == whole.row[1:]))
    assert pairs.size > 3000
    assert stats.spearmanr(start_of_b[pairs], kept[pairs + 1]).pvalue > CHANCE


@pytest.mark.parametrize(
    ("sizes", "lost"), [((10, 1), (1, 0)), ((12, 12), (2, 3)), ((80, 3), (73, 0)), ((9, 140), (4, 135))]
)
def test_pieces_are_lost_at_front_and_back_alike(sizes: tuple[int, int], lost: tuple[int, int]) -> None:
    times, room = 3000, sum(sizes) - sum(lost)
    before = plan_of(np.full(times, sizes[0]), np.full(times, sizes[1]))
    after = truncated(before, room)
    fronts = after.a_start - before.a_start, after.b_start - before.b_start
    backs = before.a_end - after.a_end, before.b_end - after.b_end
    for front, back, number in zip(fronts, backs, lost, strict=True):
        assert (front + back == number).all()
        assert (front >= 0).all()
        assert (back >= 0).all()
        fair = np.random.default_rng(1).binomial(number, 0.5, 20 * times)
        assert chance_alike(front, fair) > CHANCE
    if min(lost):
        assert stats.pearsonr(*fronts).pvalue > CHANCE


def test_of_a_tie_and_of_the_longer_segment_pieces_are_lost_as_in_the_original() -> None:
    times, draw = 3000, Random(5)
    before = plan_of(np.full(times, 21), np.full(times, 14))
    after = truncated(before, 25)
    theirs = [original.truncate(list(range(21)), list(range(14)), 25, draw) for _ in range(times)]
    assert chance_alike(after.a_start - before.a_start, [a[0] for a, _ in theirs]) > CHANCE
    assert chance_alike(after.b_start - before.b_start, [b[0] for _, b in theirs]) > CHANCE
