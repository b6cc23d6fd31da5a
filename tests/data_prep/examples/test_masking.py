"""The masks of data_prep/masking.py, against the original's rules and its distributions."""

import itertools
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.corpora import CHANCE, chance_alike, group_words, mask_original

from data_prep.common.arrays import Array
from data_prep.examples.making import make_masking_rules
from data_prep.examples.masking import Masking, count_predictions, mask_example
from data_prep.examples.streams import begin_stream
from data_prep.settings import MaskedUnit, Settings
from data_prep.vocabulary.kinds.wordpiece import SPECIAL, WordPiece

WORDS = [f"word{number}" for number in range(595)]
RESTS = [f"##{number}" for number in range(400)]
VOCABULARY = WordPiece((*SPECIAL, *WORDS, *RESTS), cased=False)
CLS, SEP, MASK = VOCABULARY.special.cls, VOCABULARY.special.sep, VOCABULARY.special.mask
FIRST_WORD, FIRST_REST = VOCABULARY.pieces.index(WORDS[0]), VOCABULARY.pieces.index(RESTS[0])
LONGEST = 512


Split = tuple[float, float, float]


class Masked(NamedTuple):
    """An example after masking."""

    pieces: Array
    positions: Array
    labels: Array
    tally: Array  # masked, replaced, kept


def rules(most: int = 77, masking: MaskedUnit = "token", rate: float = 0.15, split: Split = (80, 10, 10)) -> Masking:
    """Makes rules of masking from settings, as the command line does, for examples of up to LONGEST pieces."""
    made = make_masking_rules(Settings(lengths=(LONGEST,), masking=masking, mask_rate=rate), LONGEST, VOCABULARY)
    most_of = count_predictions(LONGEST, rate, most)
    return made._replace(predictions=most_of, mask_share=split[0] / 100, random_share=split[1] / 100)


def pair(a: list[int], b: list[int]) -> tuple[Array, int]:
    """Makes an example of two segments; returns it with the place where B begins."""
    return np.array([CLS, *a, SEP, *b, SEP], np.uint16), len(a) + 2


def masked(example: tuple[Array, int], masking: Masking, number: int = 0) -> Masked:
    """Masks a copy of the example with the stream of this number."""
    pieces, boundary = example[0].copy(), example[1]
    candidates, words = np.empty(LONGEST + 1, np.int64), np.empty(LONGEST + 2, np.int64)
    most = int(masking.predictions[pieces.size])
    positions, labels, tally = np.empty(most, np.uint16), np.empty(most, np.uint16), np.zeros(3, np.int64)
    state = begin_stream(12345, LONGEST, 0, number)
    count = mask_example(state, pieces, boundary, masking, candidates, words, positions, labels, tally)
    return Masked(pieces, positions[:count], labels[:count], tally)


def words_of(example: tuple[Array, int]) -> list[list[int]]:
    return group_words(example[0].tolist(), {CLS, SEP}, VOCABULARY.continues)


def plain(size_a: int, size_b: int) -> tuple[Array, int]:
    """Makes an example of whole words, no two of which are the same."""
    a = list(range(FIRST_WORD, FIRST_WORD + size_a))
    return pair(a, list(range(FIRST_WORD + size_a, FIRST_WORD + size_a + size_b)))


def mixed(sizes_a: list[int], sizes_b: list[int]) -> tuple[Array, int]:
    """Makes an example of words that have these numbers of pieces."""
    rests = itertools.count(FIRST_REST)

    def segment(sizes: list[int]) -> list[int]:
        return [piece for size in sizes for piece in [FIRST_WORD + size, *itertools.islice(rests, size - 1)]]

    return pair(segment(sizes_a), segment(sizes_b))


MIXED = mixed([1, 3, 1, 2, 5, 1, 1, 2, 4], [2, 1, 1, 6, 1, 3, 1, 1, 2, 1, 1])
PIECES = st.lists(st.integers(FIRST_WORD, len(VOCABULARY) - 1), min_size=1, max_size=60)
EXAMPLES = st.builds(pair, PIECES, PIECES)
SINGLES = PIECES.map(lambda a: (np.array([CLS, *a, SEP], np.uint16), len(a) + 2))
ANY_RULES = st.builds(
    rules,
    st.integers(1, 40),
    st.sampled_from(["token", "whole-word"]),
    st.sampled_from([0.01, 0.15, 0.5, 0.99]),
    st.sampled_from([(80, 10, 10), (0, 100, 0), (0, 0, 100), (34, 33, 33)]),
)


# How many


def test_a_half_prediction_goes_to_the_even_neighbour() -> None:
    found = count_predictions(LONGEST, 0.15, 80)
    assert [int(found[length]) for length in (3, 10, 30, 50, 70, 128, 512)] == [1, 2, 4, 8, 10, 19, 77]
    assert [Settings().predictions(length) for length in (128, 512)] == [20, 80]  # as in the original


@pytest.mark.parametrize("most", [1, 20, 77])
def test_every_length_gets_its_predictions(most: int) -> None:
    masking = rules(most)
    for length in range(5, LONGEST + 1):
        size_a = 1 + length * 7 % (length - 4)
        result = masked(plain(size_a, length - 3 - size_a), masking, length)
        assert len(result.positions) == min(most, max(1, round(length * 0.15)))
    assert masked(pair([7], [8]), rules(rate=0.99)).positions.tolist() == [1, 3]  # no more than there are pieces


# Which


@settings(max_examples=60)
@given(st.one_of(EXAMPLES, SINGLES), ANY_RULES, st.integers(0, 1000))
def test_the_masks_of_any_example(example: tuple[Array, int], masking: Masking, number: int) -> None:
    """Labels put back give the example, no special piece is masked, and words are masked whole while they fit."""
    result = masked(example, masking, number)
    restored = result.pieces.copy()
    restored[result.positions] = result.labels
    np.testing.assert_array_equal(restored, example[0])
    assert result.tally.sum() == len(result.positions)
    assert (np.diff(result.positions.astype(int)) > 0).all()
    assert not set(example[0][result.positions].tolist()) & {CLS, SEP}
    chosen = set(result.positions.tolist())
    left = int(masking.predictions[example[0].size]) - len(chosen)
    assert left >= 0
    for word in words_of(example):
        if masking.whole_word:
            assert chosen.issuperset(word) or not chosen & set(word)
            assert chosen & set(word) or len(word) > left
        else:
            assert left == 0 or chosen.issuperset(word)
    for one, other in zip(result, masked(example, masking, number), strict=True):
        np.testing.assert_array_equal(one, other)


def rules_of_most(most: int, masking: MaskedUnit = "token") -> Masking:
    """Makes rules that predict so many pieces, whatever the length of the example."""
    return rules(most, masking, rate=0.99)


def test_every_set_of_pieces_is_as_likely_as_any_other() -> None:
    masking = rules_of_most(2)
    sets = [tuple(masked(plain(2, 3), masking, number).positions.tolist()) for number in range(4000)]
    counts = [sets.count(positions) for positions in itertools.combinations((1, 2, 4, 5, 6), 2)]
    assert sum(counts) == 4000
    assert stats.chisquare(counts).pvalue > CHANCE


# Whole words


CUT_WORDS = pair([FIRST_REST, FIRST_REST + 1, 7, FIRST_REST], [FIRST_REST + 2, 9])
"""Truncation has cut a word in two at the front of A and of B."""


def test_a_piece_that_continues_a_word_goes_with_the_last_of_a_where_b_begins() -> None:
    assert words_of(CUT_WORDS) == [[1, 2], [3, 4, 6], [7]]
    seen = {
        tuple(masked(CUT_WORDS, rules_of_most(3, "whole-word"), number).positions.tolist()) for number in range(300)
    }
    assert seen == {(1, 2, 7), (3, 4, 6)}


def test_a_word_that_would_exceed_the_number_is_passed_over() -> None:
    example, none = mixed([4, 1], [1]), mixed([3], [4, 5])
    seen = {tuple(masked(example, rules_of_most(2, "whole-word"), number).positions.tolist()) for number in range(100)}
    assert seen == {(5, 7)}
    result = masked(none, rules_of_most(2, "whole-word"))
    assert result.positions.size == 0
    np.testing.assert_array_equal(result.pieces, none[0])


def test_another_document_begins_with_a_word() -> None:
    """Where an example has several, whatever its first piece looks like; the separator between them is no candidate."""
    two = np.array([CLS, 7, SEP, FIRST_REST, FIRST_REST + 1, SEP], np.uint16), 6
    seen = {tuple(masked(two, rules_of_most(2, "whole-word"), number).positions.tolist()) for number in range(50)}
    assert seen == {(1,), (3, 4)}
    pieces = {tuple(masked(two, rules_of_most(5), number).positions.tolist()) for number in range(50)}
    assert pieces == {(1, 3, 4)}


@pytest.mark.parametrize(("most", "example"), [(3, MIXED), (6, MIXED), (11, MIXED), (4, CUT_WORDS)])
@pytest.mark.parametrize("kind", ["token", "whole-word"])
def test_masks_are_distributed_as_the_original_ones(kind: MaskedUnit, most: int, example: tuple[Array, int]) -> None:
    pieces, masking, draw, times = example[0], rules_of_most(most, kind), Random(7), 3000
    words = words_of(example)
    if kind == "token":
        words = [[position] for word in words for position in word]
    ours = [masked(example, masking, number) for number in range(times)]
    theirs = [mask_original(pieces.tolist(), words, most, MASK, len(VOCABULARY), draw) for _ in range(times)]
    chosen = [each.positions.tolist() for each in ours], [sorted(labels) for _, labels in theirs]
    assert chance_alike(*([len(positions) for positions in side] for side in chosen)) > CHANCE
    assert chance_alike(*([max(positions) for positions in side] for side in chosen)) > CHANCE
    for word in words:
        hits = [sum(word[0] in positions for positions in side) for side in chosen]
        assert stats.fisher_exact([hits, [times - hit for hit in hits]]).pvalue > CHANCE / len(words)
    unchanged = [int((each.pieces == pieces).sum()) for each in ours]
    assert chance_alike(unchanged, [int((np.array(result) == pieces).sum()) for result, _ in theirs]) > CHANCE


# What stands there


@pytest.mark.parametrize("split", [(80, 10, 10), (60, 15, 25), (100, 0, 0), (0, 100, 0), (0, 0, 100), (50, 0, 50)])
def test_pieces_become_masks_and_others_in_the_shares_set(split: Split) -> None:
    example, masking = plain(60, 60), rules(split=split)
    found, tally = np.zeros(3, int), np.zeros(3, int)
    for number in range(600):
        result = masked(example, masking, number)
        now = result.pieces[result.positions]
        mask, kept = now == MASK, now == result.labels
        found += [mask.sum(), (~mask & ~kept).sum(), kept.sum()]
        tally += result.tally
    total = found.sum()
    assert total == 600 * round(123 * 0.15)
    for share, count in zip(split, tally.tolist(), strict=True):
        assert stats.binomtest(count, total, share / 100).pvalue > CHANCE
    # A random piece is the mask, or the piece itself, once in a vocabulary.
    assert (abs(found - tally) <= stats.binom(tally[1], 2 / len(VOCABULARY)).isf(CHANCE)).all()


def test_what_becomes_of_a_piece_does_not_depend_on_where_it_is() -> None:
    example, masking = plain(20, 20), rules(rate=0.4)
    table = np.zeros((2, 4), int)
    for number in range(1500):
        result = masked(example, masking, number)
        is_mask = result.pieces[result.positions] == MASK
        np.add.at(table, (is_mask.astype(int), result.positions // 11), 1)
    assert stats.chi2_contingency(table).pvalue > CHANCE


def test_random_pieces_are_of_the_whole_vocabulary() -> None:
    example, masking = plain(200, 200), rules(split=(0, 100, 0))
    counts = np.zeros(len(VOCABULARY), int)
    for number in range(400):
        result = masked(example, masking, number)
        counts += np.bincount(result.pieces[result.positions], minlength=len(VOCABULARY))
    assert len(counts) == len(VOCABULARY)
    assert stats.chisquare(counts).pvalue > CHANCE
    assert counts[[0, CLS, SEP, MASK, len(VOCABULARY) - 1]].all()
