"""The segments of data_prep/examples/pairs.py: the original's rules for single examples, and draws as it makes them."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.corpora import (
    CHANCE,
    LENGTHS,
    SEED,
    SHORT,
    Made,
    Sizes,
    all_rows,
    chance_alike,
    copied,
    corpus_of,
    document_sizes,
    make,
    plan_of,
    pool_of,
    starts_of,
    truncate_original,
    truncated,
    varied,
)

from data_prep.examples.pairs import Segments, fill_second, place_partners, plan_segments, truncate
from data_prep.examples.parts import Pool


def make_any(documents: Sizes, length: int, short: float, seed: int) -> Made:
    return make(corpus_of(documents), length, seed=seed, short=short)


MADE = st.builds(make_any, document_sizes() | document_sizes(200), LENGTHS, SHORT, st.integers(0, 2**63 - 1))


@settings(max_examples=60)
@given(MADE)
def test_a_document_is_used_up_in_order_and_unused_sentences_are_put_back(made: Made) -> None:
    """Segments A, and B where it is the true next, are the document again; a random B takes nothing from it."""
    corpus, _, whole, _, _ = made
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


@settings(max_examples=60)
@given(MADE)
def test_sentences_are_gathered_until_the_target_is_reached(made: Made) -> None:
    corpus, room, whole, _, short = made
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


@settings(max_examples=60)
@given(MADE)
def test_a_random_next_has_whole_sentences_until_the_target_is_reached(made: Made) -> None:
    corpus, _, whole, _, _ = made
    starts, ends = starts_of(corpus.sentence_ends), corpus.sentence_ends
    for example in np.flatnonzero(whole.partner >= 0):
        row = whole.partner[example]
        in_partner = slice(starts_of(corpus.document_ends)[row], corpus.document_ends[row])
        assert whole.b_start[example] in starts[in_partner]
        enough = ends[in_partner][ends[in_partner] >= whole.b_start[example] + max(1, whole.wanted[example])]
        assert whole.b_end[example] == (enough[0] if enough.size else ends[in_partner][-1])


@settings(max_examples=60)
@given(MADE)
def test_examples_fit_and_segments_are_parts_of_what_they_were(made: Made) -> None:
    _, room, whole, plan, _ = made
    size_a, size_b = plan.a_end - plan.a_start, plan.b_end - plan.b_start
    assert min(size_a.min(), size_b.min()) >= 1
    whole_size = (whole.a_end - whole.a_start) + (whole.b_end - whole.b_start)
    np.testing.assert_array_equal(size_a + size_b, np.minimum(room, whole_size))
    assert (whole.a_start <= plan.a_start).all() & (plan.a_end <= whole.a_end).all()
    assert (whole.b_start <= plan.b_start).all() & (plan.b_end <= whole.b_end).all()
    true_next = plan.partner < 0
    assert (plan.a_end <= plan.b_start)[true_next].all()


@settings(max_examples=120)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(5, 509), st.integers(0, 1000))
def test_truncation_is_that_of_dropping_single_pieces(size_a: int, size_b: int, room: int, number: int) -> None:
    plan = truncated(plan_of(np.array([size_a]), np.array([size_b]), number), room)
    a, b = truncate_original(list(range(size_a)), list(range(size_b)), room, Random(number))
    assert (plan.a_end - plan.a_start).tolist() == [len(a)]
    assert (plan.b_end - plan.b_start).tolist() == [len(b)]


def test_only_the_chosen_examples_are_truncated() -> None:
    before = plan_of(np.array([50, 50, 50]), np.array([50, 50, 50]))
    after = copied(before)
    truncate(np.array([1]), after, 20)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[[0, 2]], other[[0, 2]])
    assert after.a_end[1] - after.a_start[1] == 10


@settings(max_examples=60)
@given(document_sizes(), LENGTHS, SHORT, st.integers(0, 9), st.data())
def test_the_plan_of_a_document_depends_on_no_other_document(
    documents: Sizes, length: int, short: float, duplicate: int, data: st.DataObject
) -> None:
    """A document is planned alike whichever documents are planned with it, and whichever are with it in the file."""
    corpus = corpus_of(documents)
    members = pool_of(corpus)
    key = (members, length, duplicate, SEED, short)
    together = plan_segments(corpus, all_rows(corpus), *key)
    row = data.draw(st.integers(0, len(documents) - 1))
    begin = data.draw(st.integers(0, row))
    stop = data.draw(st.integers(row + 1, len(documents)))
    part = corpus_of(documents[begin:stop], begin)
    rest = data.draw(st.permutations([one for one in range(stop - begin) if one != row - begin]))
    others = np.array([row - begin, *rest])
    alone, elsewhere = plan_segments(corpus, np.array([row]), *key), plan_segments(part, others[:2], *key)
    pieces_before = sum(sum(document) for document in documents[:begin])
    for name in Segments._fields:
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
        plan_segments(corpus, all_rows(corpus), pool_of(corpus), short=0.0, **{**key, part: key[part] + more})
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


def test_partners_are_members() -> None:
    corpus = corpus_of([[5, 5, 5]] * 50, first=70)
    held_out = np.array([71, 90, 113])
    validation = Pool(np.zeros(1, np.int64), np.array([3]), held_out, training=False)
    plan = plan_segments(corpus, all_rows(corpus), validation, 13, 0, SEED, 0.0)
    assert set(plan.partner.tolist()) == {-1, *held_out.tolist()}
    training = Pool(np.zeros(1, np.int64), np.array([47]), held_out - 70, training=True)
    plan = plan_segments(corpus_of([[5, 5, 5]] * 50), np.arange(50), training, 13, 0, SEED, 0.0)
    assert set(plan.partner.tolist()) <= {-1, *range(50)} - {1, 20, 43}
    assert len(set(plan.partner.tolist())) > 25


def test_a_random_next_is_the_same_whichever_file_its_document_is_in() -> None:
    documents = varied(60)
    corpus, whole = corpus_of(documents), make(corpus_of(documents), 48).whole
    plan = plan_segments(corpus, all_rows(corpus), pool_of(corpus), 48, 0, SEED, 0.0)
    place_partners(np.flatnonzero((plan.partner >= 0) & (plan.partner < 25)), plan, corpus_of(documents[:25]))
    later = np.flatnonzero(plan.partner >= 25)
    place_partners(later, plan, corpus_of(documents[25:], 25))
    before = sum(sum(document) for document in documents[:25])
    plan.b_start[later] += before
    plan.b_end[later] += before
    for one, other in zip(plan, whole, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_second_segments_are_copied_to_their_rows() -> None:
    corpus, room, _, plan, _ = make(corpus_of([[7, 30, 2, 11]] * 20), 24)
    second = np.full((plan.row.size, room), 9999, np.uint16)
    chosen = np.arange(0, plan.row.size, 2)
    fill_second(chosen, plan, corpus, second)
    assert (second[1::2] == 9999).all()
    for example in chosen:
        b = corpus.pieces[plan.b_start[example] : plan.b_end[example]].tolist()
        assert second[example].tolist() == b + [9999] * (room - len(b))


def test_a_sentence_of_millions_of_pieces_is_cut_at_both_ends() -> None:
    made = make(corpus_of([[5_000_000], [3_000_000, 4]]), 128)
    lost = (made.plan.a_start - made.whole.a_start)[0], (made.whole.a_end - made.plan.a_end)[0]
    assert sum(lost) > 4_999_000
    assert stats.binomtest(int(lost[0]), int(sum(lost))).pvalue > CHANCE


def test_a_corpus_of_many_examples_is_planned_whole() -> None:
    """The columns of a plan grow when a document, or many, have more examples than there is room for at first."""
    plan = make(corpus_of([[1] * 30_000, *[[2]] * 5000]), 8).whole
    assert plan.row.size > 10_000
    np.testing.assert_array_equal(np.unique(plan.row), np.arange(5001))
    assert (np.diff(plan.a_start) > 0).all()


def test_ten_draws_are_made_for_another_document() -> None:
    """Where there are two documents, a document is its own partner once in 2¹⁰."""
    corpus = corpus_of([[5]] * 2)
    times = 40_000
    members = pool_of(corpus)
    plans = [plan_segments(corpus, all_rows(corpus), members, 16, number, SEED, 0.0) for number in range(times // 2)]
    own = sum(int((plan.partner == plan.row).sum()) for plan in plans)
    assert stats.binomtest(own, times, 2**-10).pvalue > CHANCE


def test_partners_are_uniform_over_the_other_documents() -> None:
    corpus = corpus_of([[3]] * 12)
    members, times = pool_of(corpus), 500
    plans = [plan_segments(corpus, all_rows(corpus), members, 16, number, SEED, 0.0) for number in range(times)]
    apart = np.concatenate([(plan.partner - plan.row) % 12 for plan in plans])
    counts = np.bincount(apart, minlength=12)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > CHANCE
    partners = np.bincount(np.concatenate([plan.partner for plan in plans]), minlength=12)
    assert stats.chisquare(partners).pvalue > CHANCE


def test_what_is_drawn_for_an_example_tells_nothing_of_the_next() -> None:
    corpus, _, whole, _, _ = make(corpus_of([[2] * 40] * 1000), 17)
    kept = (whole.a_end - whole.a_start) // 2
    start_of_b = np.searchsorted(starts_of(corpus.sentence_ends), whole.b_start) % 40
    pairs = np.flatnonzero((whole.partner[:-1] >= 0) & (whole.row[:-1] == whole.row[1:]))
    assert pairs.size > 3000
    assert stats.spearmanr(start_of_b[pairs], kept[pairs + 1]).pvalue > CHANCE


@pytest.mark.parametrize(("sizes", "lost"), [((10, 1), (1, 0)), ((12, 12), (2, 3)), ((9, 140), (4, 135))])
def test_pieces_are_lost_at_front_and_back_alike(sizes: tuple[int, int], lost: tuple[int, int]) -> None:
    times, room = 3000, sum(sizes) - sum(lost)
    before = plan_of(np.full(times, sizes[0]), np.full(times, sizes[1]))
    after = truncated(before, room)
    fronts = after.a_start - before.a_start, after.b_start - before.b_start
    backs = before.a_end - after.a_end, before.b_end - after.b_end
    for front, back, number in zip(fronts, backs, lost, strict=True):
        assert (front + back == number).all() & (front >= 0).all() & (back >= 0).all()
        fair = np.random.default_rng(1).binomial(number, 0.5, 20 * times)
        assert chance_alike(front, fair) > CHANCE
    if min(lost):
        assert stats.pearsonr(*fronts).pvalue > CHANCE
