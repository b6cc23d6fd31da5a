"""TextWindows and the best spans in them, beside plain loops over all pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tasks import LETTERS, cutter, random_outputs

from data_prep.common.errors import UserError
from finetuning.inputs import Ragged
from finetuning.settings import FineTuning, Spans
from finetuning.tasks.spans import TextWindows, find_answers, find_pieces

QUESTION = 3


def settings(length: int = 12, stride: int = 3, answer: int = 4, best: int = 20) -> FineTuning:
    spans = Spans(stride=stride, question=QUESTION, answer=answer, best=best)
    return FineTuning(length=length, spans=spans)


def text(pieces: int) -> str:
    """A text of so many pieces, all of them different as long as there are letters."""
    return " ".join(LETTERS[number % len(LETTERS)] for number in range(pieces))


SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5)
SHAPES = st.builds(settings, st.integers(8, 16), st.integers(1, 12))


def plain_windows(question: int, size: int, shape: FineTuning) -> list[tuple[int, int]]:
    """Where windows begin and end, by the loop of the original."""
    room, start, found = shape.length - min(question, QUESTION) - 3, 0, []
    while True:
        found.append((start, min(start + room, size)))
        if start + room >= size:
            return found
        start += min(room, shape.spans.stride)


def plain_owner(windows: list[tuple[int, int]], piece: int) -> int:
    """The window in which a piece has most context, by the rule of the original; the first of equals."""
    best, owner = -np.inf, -1
    for number, (begin, end) in enumerate(windows):
        if begin <= piece < end:
            score = min(piece - begin, end - 1 - piece) + 0.01 * (end - begin)
            if score > best:
                best, owner = score, number
    return owner


@given(SIZES, SHAPES)
def test_windows_cover_every_piece_which_the_one_with_most_context_owns(
    sizes: list[tuple[int, int]], shape: FineTuning
) -> None:
    pairs = [(text(question), text(size)) for question, size in sizes]
    windows = TextWindows(pairs, cutter(), shape)
    encoded = windows.encode(np.arange(len(windows)))
    assert len(encoded) == len(windows) == windows.places.first[-1]
    assert encoded.labels is None
    special = cutter().special
    for number, (question, size) in enumerate(sizes):
        rows = range(windows.places.first[number], windows.places.first[number + 1])
        spread = plain_windows(question, size, shape)
        assert [(windows.places.begins[row], windows.places.ends[row]) for row in rows] == spread
        owners = [plain_owner(spread, piece) for piece in range(size)]
        for row, (begin, end) in enumerate(spread):
            owned = windows.find_owned(rows.start + row)
            assert owned.tolist() == [owners[piece] == row for piece in range(begin, end)]
        whole = cutter().cut_texts([pairs[number][1]]).values.tolist()
        asked = cutter().cut_texts([pairs[number][0]]).values.tolist()[:QUESTION]
        covered = set()
        for row in rows:
            seen = whole[windows.places.begins[row] : windows.places.ends[row]]
            expected = [special.cls, *asked, special.sep, *seen, special.sep]
            assert encoded.sequences.pieces.row(row).tolist() == expected
            assert encoded.sequences.second[row] == windows.count_before(np.array([row]))[0] == len(asked) + 2
            assert len(expected) <= shape.length
            covered |= set(range(windows.places.begins[row], windows.places.ends[row]))
        assert covered == set(range(size))


@given(SIZES, SHAPES, st.integers(0, 99), st.booleans())
def test_answers_are_those_that_trying_all_spans_finds(
    sizes: list[tuple[int, int]], shape: FineTuning, seed: int, optional: bool
) -> None:
    pairs = [(text(question), text(size)) for question, size in sizes]
    windows = TextWindows(pairs, cutter(), shape)
    outputs = random_outputs(windows, seed)
    for number, answers in enumerate(find_answers(windows, outputs, optional)):
        question, size = sizes[number]
        spread = plain_windows(question, size, shape)
        best: dict[str, float] = {}
        for row, (begin, end) in enumerate(spread):
            values = outputs.row(windows.places.first[number] + row)[min(question, QUESTION) + 2 :].astype(float)
            for first in (piece for piece in range(begin, end) if plain_owner(spread, piece) == row):
                for last in range(first, min(first + shape.spans.answer, end)):
                    words = " ".join(pairs[number][1].split()[first : last + 1])
                    score = values[first - begin, 0] + values[last - begin, 1]
                    best[words] = max(score, best.get(words, -np.inf))
        ranked = sorted(best, key=lambda words: -best[words])
        null = min(outputs.row(row)[0].astype(float).sum() for row in range(*windows.places.first[number : number + 2]))
        given = [each for each in answers.candidates if each.text]
        assert answers.text() == ranked[0]
        assert [each.start_logit + each.end_logit for each in given[:8]] == [best[words] for words in ranked[:8]]
        assert (answers.odds, answers.text(threshold=answers.odds)) == (null - best[ranked[0]], ranked[0])
        assert answers.text(threshold=answers.odds - 1e-6) == ""
        assert len(answers.candidates) - len(given) == optional
        totals = np.array([each.start_logit + each.end_logit for each in answers.candidates])
        assert (np.diff(totals) <= 0).all()
        shares = np.exp(totals - totals[0]) / np.exp(totals - totals[0]).sum()
        assert [each.probability for each in answers.candidates] == pytest.approx(shares.tolist())
        assert all(pairs[number][1][each.start :].startswith(each.text) for each in given)


def test_as_many_answers_as_wanted_without_doubles() -> None:
    windows = TextWindows([("a", "b b b b c")], cutter(), settings(answer=1, best=2))
    answers = next(find_answers(windows, random_outputs(windows, 1), optional=False))
    assert sorted(each.text for each in answers.candidates) == ["b", "c"]


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("context", ["\x00\x01", "a b c"])
def test_a_question_without_any_candidate_has_an_empty_answer(context: str, optional: bool) -> None:
    """A text without pieces, and a model whose outputs are no numbers."""
    windows = TextWindows([("a", context), ("a", "b")], cutter(), settings())
    outputs = random_outputs(windows, 1)
    outputs.row(0)[1:] = np.nan
    empty, whole = find_answers(windows, outputs, optional)
    assert (empty.text(), empty.text(0.0), whole.text()) == ("", "", "b")
    assert empty.odds == outputs.row(0)[0].astype(float).sum()
    assert [each.text for each in empty.candidates] == [""] * optional
    assert all(each.probability == 1.0 for each in empty.candidates)


def test_answers_are_cut_from_the_text_itself() -> None:
    """Capitals, accents and white space stay as they stand in the text."""
    context = "A  BÉ\u00a0\tc"
    windows = TextWindows([("a", context)], cutter(), settings())
    encoded = windows.encode(np.arange(1))
    ends = encoded.sequences.pieces.ends
    outputs = Ragged(np.zeros((ends[-1], 2), np.float32), ends)
    size, before = int(windows.places.ends[0]), 3
    outputs.values[before + 1, 0] = outputs.values[before + size - 1, 1] = 9
    (answers,) = find_answers(windows, outputs, optional=False)
    assert (answers.text(), answers.candidates[0].start) == ("BÉ\u00a0\tc", 3)


@pytest.mark.parametrize(
    ("start", "end", "pieces"),
    [(0, 3, (0, 0)), (1, 2, (0, 0)), (2, 5, (0, 1)), (3, 4, (1, 0)), (4, 9, (1, 2)), (7, 8, (2, 2)), (9, 10, (3, 2))],
)
def test_an_answer_takes_the_pieces_that_hold_its_ends(start: int, end: int, pieces: tuple[int, int]) -> None:
    offsets = np.array([(0, 3), (4, 6), (6, 9)])
    assert find_pieces(offsets, start, end) == pieces


def test_a_length_without_room_for_text_is_refused() -> None:
    assert len(TextWindows([], cutter(), settings())) == 0
    with pytest.raises(UserError, match=r"length = 8 leaves no room for text beside a question of 5 pieces"):
        TextWindows([("a", "b")], cutter(), FineTuning(length=8, spans=Spans(question=5)))


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast  # type: ignore[attr-defined, unused-ignore]

    cutter().vocabulary.write(tmp_path)
    theirs = BertTokenizerFast.from_pretrained(tmp_path)
    shape = settings(length=16, stride=4)
    pairs = [(text(question), text(size)) for question in (1, 3) for size in (1, 9, 10, 11, 14, 15, 40)]
    windows = TextWindows(pairs, cutter(), shape)
    ours = windows.encode(np.arange(len(windows))).sequences.pieces
    for number, (question, context) in enumerate(pairs):
        overlap = 16 - 3 - len(question.split()) - 4  # what they call a stride
        given = theirs(
            question, context, truncation="only_second", max_length=16, stride=overlap, return_overflowing_tokens=True
        )
        rows = range(windows.places.first[number], windows.places.first[number + 1])
        assert [ours.row(row).tolist() for row in rows] == given["input_ids"]
