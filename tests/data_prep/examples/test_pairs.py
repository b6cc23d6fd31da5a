"""The segments of data_prep/pairs.py, against the original's rules, exactly, and against its distributions."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support import original
from support.original import CHANCE, chance_alike

from data_prep.examples.pairs import Corpus, Plan, copy_second, place_partners, plan_pairs, plan_sentences, truncate

Sizes = Sequence[Sequence[int]]  # documents, as the numbers of pieces of their sentences
SEED = 12345


def corpus_of(documents: Sizes, first: int = 0) -> Corpus:
    """As read from a file; each piece is its own position."""
    sentence_ends = np.cumsum([size for document in documents for size in document]).astype(np.int32)
    document_ends = np.cumsum([len(document) for document in documents]).astype(np.int32)
    pieces = (np.arange(sentence_ends[-1]) % (1 << 16)).astype(np.uint16)
    for array in (pieces, sentence_ends, document_ends):
        array.flags.writeable = False
    return Corpus(pieces, sentence_ends, document_ends, np.int64(first))


def all_rows(corpus: Corpus) -> np.ndarray:
    return np.arange(corpus.document_ends.size)


def all_numbers(corpus: Corpus) -> np.ndarray:
    return (corpus.first + all_rows(corpus)).astype(np.uint32)


def copied(plan: Plan) -> Plan:
    return Plan(*(column.copy() for column in plan))


class Made(NamedTuple):
    """The examples of a corpus, before and after they are truncated."""

    corpus: Corpus
    room: int
    whole: Plan
    plan: Plan


def make(corpus: Corpus, length: int, duplicate: int = 0, seed: int = SEED, short: float = 0.0) -> Made:
    """All examples of all documents, which are in one file."""
    whole = plan_pairs(corpus, all_rows(corpus), all_numbers(corpus), length, duplicate, seed, short)
    place_partners(np.flatnonzero(whole.partner >= 0), whole, corpus)
    plan = copied(whole)
    truncate(np.arange(plan.row.size), plan, length - 3)
    return Made(corpus, length - 3, whole, plan)


def starts_of(ends: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], ends[:-1]])


def first_of_each(row: np.ndarray) -> np.ndarray:
    """The first example of each document."""
    return np.unique(row, return_index=True)[1]


def last_of_each(row: np.ndarray) -> np.ndarray:
    return row.size - 1 - np.unique(row[::-1], return_index=True)[1]


def document_sizes(lengths: int = 40) -> st.SearchStrategy[list[list[int]]]:
    sentence = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, lengths))
    return st.lists(st.lists(sentence, min_size=1, max_size=15), min_size=1, max_size=8)


LENGTHS = st.integers(8, 40)
SHORT = st.sampled_from([0.0, 0.5, 1.0])


# Exactly


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_a_document_is_used_up_in_order_and_unused_sentences_are_put_back(
    documents: Sizes, length: int, short: float, seed: int
) -> None:
    """Segments A, and B where it is the true next, are the document again; a random B takes nothing from it."""
    corpus, _, whole, _ = make(corpus_of(documents), length, seed=seed, short=short)
    last_pieces = corpus.sentence_ends[corpus.document_ends - 1]
    np.testing.assert_array_equal(np.unique(whole.row), all_rows(corpus))
    at = 0
    for row, a_start, a_end, b_start, b_end, partner, *_ in zip(*whole, strict=True):
        assert a_start == at < a_end <= last_pieces[row]
        assert row == np.searchsorted(last_pieces, at, side="right")
        at = a_end
        if partner < 0:
            assert b_start == a_end < b_end <= last_pieces[row]
            at = b_end
    assert at == last_pieces[-1]


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_sentences_are_gathered_until_the_target_is_reached(
    documents: Sizes, length: int, short: float, seed: int
) -> None:
    corpus, room, whole, _ = make(corpus_of(documents), length, seed=seed, short=short)
    ends = corpus.sentence_ends
    for row in all_rows(corpus):
        mine = np.flatnonzero(whole.row == row)
        random_next = mine[whole.partner[mine] >= 0]
        targets = whole.a_end[random_next] - whole.a_start[random_next] + whole.wanted[random_next]
        assert np.unique(targets).size <= 1  # one target for a document
        if not targets.size:
            targets = np.array([room])
        assert targets[0] == room if short == 0 else 2 <= targets[0] <= room
        if short > 0 and not random_next.size:
            continue  # the target has left no trace
        for example in mine:
            begin = whole.a_start[example]
            reached = ends[np.searchsorted(ends, begin + targets[0])] if begin + targets[0] < ends[-1] else ends[-1]
            gathered_end = min(reached, ends[corpus.document_ends[row] - 1])
            gathered = ends[(ends > begin) & (ends <= gathered_end)]
            if whole.partner[example] < 0:
                assert whole.b_end[example] == gathered_end
            assert whole.a_end[example] in (gathered[:-1] if gathered.size > 1 else gathered)
            assert whole.partner[example] >= 0 or gathered.size > 1


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_a_random_next_has_whole_sentences_until_the_target_is_reached(
    documents: Sizes, length: int, short: float, seed: int
) -> None:
    corpus, _, whole, _ = make(corpus_of(documents), length, seed=seed, short=short)
    starts, ends = starts_of(corpus.sentence_ends), corpus.sentence_ends
    for example in np.flatnonzero(whole.partner >= 0):
        row = whole.partner[example]
        in_partner = slice(starts_of(corpus.document_ends)[row], corpus.document_ends[row])
        assert whole.b_start[example] in starts[in_partner]
        enough = ends[in_partner][ends[in_partner] >= whole.b_start[example] + max(1, whole.wanted[example])]
        assert whole.b_end[example] == (enough[0] if enough.size else ends[in_partner][-1])


@settings(deadline=None, max_examples=300)
@given(document_sizes(200), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_examples_fit_and_segments_are_parts_of_what_they_were(
    documents: Sizes, length: int, short: float, seed: int
) -> None:
    _, room, whole, plan = make(corpus_of(documents), length, seed=seed, short=short)
    size_a, size_b = plan.a_end - plan.a_start, plan.b_end - plan.b_start
    assert (size_a >= 1).all()
    assert (size_b >= 1).all()
    whole_size = (whole.a_end - whole.a_start) + (whole.b_end - whole.b_start)
    np.testing.assert_array_equal(size_a + size_b, np.minimum(room, whole_size))
    assert (whole.a_start <= plan.a_start).all()
    assert (plan.a_end <= whole.a_end).all()
    assert (whole.b_start <= plan.b_start).all()
    assert (plan.b_end <= whole.b_end).all()
    true_next = plan.partner < 0
    assert (plan.a_end <= plan.b_start)[true_next].all()


def plan_of(size_a: np.ndarray, size_b: np.ndarray, number: int = 0) -> Plan:
    """Examples of segments of these sizes, with streams of their own."""
    columns = np.zeros((8, size_a.size), np.int64)
    columns[1], columns[2] = 1000, 1000 + size_a
    columns[3], columns[4] = 5_000_000, 5_000_000 + size_b
    columns[5] = -1
    columns[7] = np.random.default_rng(number).integers(0, 2**63, size_a.size)
    return Plan.of(columns)


def truncated(plan: Plan, room: int) -> Plan:
    result = copied(plan)
    truncate(np.arange(plan.row.size), result, room)
    return result


@settings(deadline=None, max_examples=500)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(5, 509), st.integers(0, 1000))
def test_truncation_leaves_the_sizes_that_dropping_single_pieces_does(
    size_a: int, size_b: int, room: int, number: int
) -> None:
    plan = truncated(plan_of(np.array([size_a]), np.array([size_b]), number), room)
    a, b = original.truncate(list(range(size_a)), list(range(size_b)), room, Random(number))
    assert (plan.a_end - plan.a_start).tolist() == [len(a)]
    assert (plan.b_end - plan.b_start).tolist() == [len(b)]


@pytest.mark.parametrize(("sizes", "room", "left"), [((5, 5), 9, (5, 4)), ((5, 5), 8, (4, 4)), ((6, 5), 9, (5, 4))])
def test_of_a_tie_b_loses_first(sizes: tuple[int, int], room: int, left: tuple[int, int]) -> None:
    plan = truncated(plan_of(np.array([sizes[0]]), np.array([sizes[1]])), room)
    assert ((plan.a_end - plan.a_start)[0], (plan.b_end - plan.b_start)[0]) == left


def test_only_the_chosen_examples_are_truncated() -> None:
    before = plan_of(np.array([50, 50, 50]), np.array([50, 50, 50]))
    after = copied(before)
    truncate(np.array([1]), after, 20)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[[0, 2]], other[[0, 2]])
    assert after.a_end[1] - after.a_start[1] == 10


@settings(deadline=None, max_examples=200)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 9), st.data())
def test_the_plan_of_a_document_depends_on_no_other_document(
    documents: Sizes, length: int, short: float, duplicate: int, data: st.DataObject
) -> None:
    """It is the same whichever documents are planned with it, and whichever are with it in the file."""
    corpus = corpus_of(documents)
    members = all_numbers(corpus)
    key = (members, length, duplicate, SEED, short)
    together = plan_pairs(corpus, all_rows(corpus), *key)
    row = data.draw(st.integers(0, len(documents) - 1))
    begin = data.draw(st.integers(0, row))
    stop = data.draw(st.integers(row + 1, len(documents)))
    part = corpus_of(documents[begin:stop], begin)
    others = np.array([row - begin, *data.draw(st.permutations(range(stop - begin)))])
    alone, elsewhere = plan_pairs(corpus, np.array([row]), *key), plan_pairs(part, others[:2], *key)
    pieces_before = sum(sum(document) for document in documents[:begin])
    for name in Plan._fields:
        expected = getattr(together, name)[together.row == row]
        np.testing.assert_array_equal(getattr(alone, name), expected)
        if name == "row":
            expected = expected - begin
        elif name in ("a_start", "a_end"):
            expected = expected - pieces_before
        elif name in ("b_start", "b_end"):
            expected = np.where(alone.partner < 0, expected - pieces_before, expected)
        np.testing.assert_array_equal(getattr(elsewhere, name)[: len(expected)], expected)


@pytest.mark.parametrize("part", ["length", "duplicate", "seed"])
def test_the_plan_depends_on_the_seed_the_length_and_the_duplicate(part: str) -> None:
    corpus = corpus_of([[3] * 50] * 3)
    key = {"length": 20, "duplicate": 1, "seed": 7}
    plans = [
        plan_pairs(corpus, all_rows(corpus), all_numbers(corpus), short=0.0, **{**key, part: key[part] + more})
        for more in (0, 0, 1)
    ]
    assert all(np.array_equal(one, same) for one, same in zip(plans[0], plans[1], strict=True))
    assert not set(plans[0].state.tolist()) & set(plans[2].state.tolist())
    assert len(set(plans[0].state.tolist())) == plans[0].state.size


def test_the_partner_of_an_only_document_is_itself() -> None:
    made = make(corpus_of([[4, 3, 9, 1]]), 8)
    assert set(made.whole.partner.tolist()) <= {-1, 0}
    assert (made.whole.partner == 0).any()
    assert (made.plan.b_end <= 17).all()


def test_the_partner_is_another_document_where_there_are_others() -> None:
    made = make(corpus_of([[5, 5, 5]] * 1000), 13)
    random_next = made.whole.partner >= 0
    assert random_next.sum() > 1000
    assert (made.whole.partner != made.whole.row)[random_next].all()


def test_ten_draws_are_made_for_another_document() -> None:
    """Of two documents, a document is its own partner once in 2¹⁰."""
    corpus = corpus_of([[5]] * 2)
    times = 80_000
    members = all_numbers(corpus)
    plans = [plan_pairs(corpus, all_rows(corpus), members, 16, number, SEED, 0.0) for number in range(times // 2)]
    own = sum(int((plan.partner == plan.row).sum()) for plan in plans)
    assert stats.binomtest(own, times, 2**-10).pvalue > CHANCE


def test_partners_are_members() -> None:
    corpus = corpus_of([[5, 5, 5]] * 50, first=70)
    members = np.array([71, 90, 113], np.uint32)
    plan = plan_pairs(corpus, all_rows(corpus), members, 13, 0, SEED, 0.0)
    assert set(plan.partner.tolist()) == {-1, *members.tolist()}


def test_a_random_next_is_the_same_whichever_file_its_document_is_in() -> None:
    documents = varied(60)
    corpus, (_, _, whole, _) = corpus_of(documents), make(corpus_of(documents), 48)
    plan = plan_pairs(corpus, all_rows(corpus), all_numbers(corpus), 48, 0, SEED, 0.0)
    place_partners(np.flatnonzero((plan.partner >= 0) & (plan.partner < 25)), plan, corpus_of(documents[:25]))
    later = np.flatnonzero(plan.partner >= 25)
    place_partners(later, plan, corpus_of(documents[25:], 25))
    before = sum(sum(document) for document in documents[:25])
    plan.b_start[later] += before
    plan.b_end[later] += before
    for one, other in zip(plan, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_second_segments_are_copied_to_their_rows() -> None:
    corpus, room, _, plan = make(corpus_of([[7, 30, 2, 11]] * 20), 24)
    second = np.full((plan.row.size, room), 9999, np.uint16)
    chosen = np.arange(0, plan.row.size, 2)
    copy_second(chosen, plan, corpus, second)
    assert (second[1::2] == 9999).all()
    for example in chosen:
        b = corpus.pieces[plan.b_start[example] : plan.b_end[example]].tolist()
        assert second[example].tolist() == b + [9999] * (room - len(b))


def test_a_sentence_of_millions_of_pieces_takes_no_time() -> None:
    make(corpus_of([[500], [700]]), 128)  # compiles
    corpus = corpus_of([[5_000_000], [3_000_000, 4]])
    began = time.perf_counter()
    made = make(corpus, 128)
    assert time.perf_counter() - began < 1
    first = 0
    lost = (made.plan.a_start - made.whole.a_start)[first], (made.whole.a_end - made.plan.a_end)[first]
    assert sum(lost) > 4_999_000
    assert stats.binomtest(int(lost[0]), int(sum(lost))).pvalue > CHANCE


def test_a_corpus_of_many_examples_is_planned_whole() -> None:
    """More than there is room for at first, in one document and in many."""
    plan = make(corpus_of([[1] * 30_000, *[[2]] * 5000]), 8).whole
    assert plan.row.size > 10_000
    np.testing.assert_array_equal(np.unique(plan.row), np.arange(5001))
    assert (np.diff(plan.a_start) > 0).all()


# As distributions, one by one


ONE_PIECE_SENTENCES = [[1] * 80] * 3000


def targets_of(made: Made) -> np.ndarray:
    """The target of each document of ONE_PIECE_SENTENCES, from its first example."""
    whole = made.whole
    gathered = np.where(whole.partner < 0, whole.b_end, whole.a_end + whole.wanted) - whole.a_start
    return gathered[first_of_each(whole.row)]


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
    members, times = all_numbers(corpus), 500
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


# As distributions, all together


def varied(num_documents: int) -> Sizes:
    """Documents of one sentence and of many, sentences of one piece and of more than there is room for."""
    draw = Random(11)
    documents = []
    for number in range(num_documents):
        num_sentences = 1 if number % 9 == 0 else draw.randint(2, 40)
        typical = draw.choice([1, 4, 12, 25])
        sizes = [max(1, round(draw.gauss(typical, typical / 2))) for _ in range(num_sentences)]
        if number % 7 == 0:
            sizes[draw.randrange(num_sentences)] = draw.choice([61, 62, 63, 150])
        documents.append(sizes)
    return documents


class Features(NamedTuple):
    """What examples are like; an array each, all of one length."""

    document: np.ndarray
    num_examples: np.ndarray  # of their document
    random_next: np.ndarray
    num_sentences_a: np.ndarray
    size_a: np.ndarray
    size_b: np.ndarray
    size: np.ndarray
    whole_a: np.ndarray
    whole_b: np.ndarray
    lost_at_front_of_a: np.ndarray
    lost_at_front_of_b: np.ndarray
    beginning_of_b: np.ndarray  # its first sentence, as a share of the document it is of, in percent

    def of(self, examples: np.ndarray) -> Features:
        return Features(*(column[examples] for column in self))


DOCUMENTS, LENGTH, DUPLICATES = varied(400), 64, 6


def our_features(short: float) -> list[Features]:
    corpus = corpus_of(DOCUMENTS)
    starts, first_sentences = starts_of(corpus.sentence_ends), starts_of(corpus.document_ends)
    num_sentences = np.diff(corpus.document_ends, prepend=0)
    features = []
    for duplicate in range(DUPLICATES):
        _, _, whole, plan = make(corpus, LENGTH, duplicate, seed=duplicate % 2, short=short)
        home = np.where(plan.partner < 0, plan.row, plan.partner)
        sentence_b = np.searchsorted(starts, whole.b_start) - first_sentences[home]
        num_a = np.searchsorted(starts, whole.a_end - 1, side="right") - np.searchsorted(starts, whole.a_start)
        size_a, size_b = plan.a_end - plan.a_start, plan.b_end - plan.b_start
        features.append(
            Features(
                plan.row,
                np.bincount(plan.row)[plan.row],
                plan.partner >= 0,
                num_a,
                size_a,
                size_b,
                size_a + size_b,
                whole.a_end - whole.a_start,
                whole.b_end - whole.b_start,
                plan.a_start - whole.a_start,
                plan.b_start - whole.b_start,
                100 * sentence_b // num_sentences[home],
            )
        )
    return features


def their_features(short: float) -> list[Features]:
    pieces = iter(range(10**9))
    documents = [[[next(pieces) for _ in range(size)] for size in document] for document in DOCUMENTS]
    sentence_of = {sentence[0]: at for document in documents for at, sentence in enumerate(document)}
    draw = Random(3)
    features = []
    for _ in range(DUPLICATES):
        rows = []
        for own in range(len(documents)):
            pairs = original.make_pairs(documents, own, LENGTH, short, draw)
            for pair in pairs:
                a, b, whole_a, whole_b = pair.a, pair.b, pair.whole_a, pair.whole_b
                home = own if pair.partner is None else pair.partner
                rows.append(
                    (
                        own,
                        len(pairs),
                        pair.partner is not None,
                        pair.num_sentences_a,
                        len(a),
                        len(b),
                        len(a) + len(b),
                        len(whole_a),
                        len(whole_b),
                        a[0] - whole_a[0],
                        b[0] - whole_b[0],
                        100 * sentence_of[whole_b[0]] // len(documents[home]),
                    )
                )
        features.append(Features(*np.array(rows).T))
    return features


@functools.cache
def both(short: float) -> tuple[list[Features], list[Features]]:
    """Ours and the original's, a set a duplicate, where so many documents have a short target."""
    return our_features(short), their_features(short)


def joined(sets: list[Features]) -> Features:
    return Features(*(np.concatenate(columns) for columns in zip(*sets, strict=True)))


@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("choose", [first_of_each, last_of_each])
@pytest.mark.parametrize("feature", Features._fields[1:])
def test_examples_are_distributed_as_the_original_ones(
    short: float, choose: Callable[[np.ndarray], np.ndarray], feature: str
) -> None:
    """One example a document, since those of a document, which share its target, are not independent."""
    ours, theirs = (getattr(joined([each.of(choose(each.document)) for each in side]), feature) for side in both(short))
    assert len(ours) == len(theirs) == DUPLICATES * len(DOCUMENTS)
    assert chance_alike(ours, theirs) > CHANCE
    assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > CHANCE


@pytest.mark.parametrize("feature", Features._fields[3:])
@pytest.mark.parametrize("random_next", [False, True])
def test_all_examples_are_distributed_as_the_original_ones(feature: str, random_next: bool) -> None:
    """Where all targets are the same, the examples of a document are near enough independent."""
    ours, theirs = (joined(side) for side in both(0.0))
    assert len(theirs.document) > 5000
    ours, theirs = (getattr(side.of(side.random_next == random_next), feature) for side in (ours, theirs))
    assert chance_alike(ours, theirs) > CHANCE
    assert stats.ks_2samp(ours, theirs, method="asymp").pvalue > CHANCE


# Without pairs


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 2**63 - 1))
def test_without_pairs_nothing_of_a_document_is_lost(documents: Sizes, length: int, short: float, seed: int) -> None:
    corpus = corpus_of(documents)
    plan = plan_sentences(corpus, all_rows(corpus), length, 0, seed, short)
    for row in all_rows(corpus):
        mine = plan.row == row
        parts = [range(*each) for each in zip(plan.a_start[mine], plan.a_end[mine], strict=True)]
        begin = sum(sum(document) for document in documents[:row])
        assert list(itertools.chain(*parts)) == list(range(begin, begin + sum(documents[row])))
        assert all(1 <= len(part) <= length - 2 for part in parts)
    assert (plan.partner == -1).all()
    assert (plan.b_end == plan.b_start).all()


@settings(deadline=None, max_examples=300)
@given(document_sizes(), LENGTHS, st.integers(0, 2**63 - 1))
def test_without_pairs_as_many_sentences_as_fit_make_an_example(documents: Sizes, length: int, seed: int) -> None:
    """A sentence is cut only where it is longer than the room, and what is left of it begins the next example."""
    corpus, room = corpus_of(documents), length - 2
    plan = plan_sentences(corpus, all_rows(corpus), length, 0, seed, 0.0)
    starts, ends = starts_of(corpus.sentence_ends), corpus.sentence_ends
    for row, start, end in zip(plan.row, plan.a_start, plan.a_end, strict=True):
        if end not in ends:
            assert end - start == room
            assert np.searchsorted(starts, start, side="right") == np.searchsorted(starts, end, side="right")
        elif end != ends[corpus.document_ends[row] - 1]:
            assert ends[np.searchsorted(ends, end) + 1] - start > room


def test_without_pairs_short_targets_are_as_with_them() -> None:
    plan = plan_sentences(corpus_of(ONE_PIECE_SENTENCES), np.arange(3000), 15, 0, SEED, 1.0)
    targets = (plan.a_end - plan.a_start)[first_of_each(plan.row)]
    assert (targets.min(), targets.max()) == (2, 13)
    assert stats.chisquare(np.bincount(targets - 2, minlength=12)).pvalue > CHANCE


def test_without_pairs_the_examples_of_a_document_depend_on_no_other() -> None:
    documents = varied(30)
    corpus = corpus_of(documents)
    together = plan_sentences(corpus, all_rows(corpus), 32, 1, SEED, 0.5)
    alone = plan_sentences(corpus_of(documents[20:], 20), np.array([5]), 32, 1, SEED, 0.5)
    mine = together.row == 25
    np.testing.assert_array_equal(alone.state, together.state[mine])
    before = sum(sum(document) for document in documents[:20])
    np.testing.assert_array_equal(alone.a_start + before, together.a_start[mine])
    np.testing.assert_array_equal(alone.a_end + before, together.a_end[mine])
